"""The tally combines the events of all ranks into one event per piece, in any order of arrival."""

import itertools
import random

import pytest

from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.events import KvFailed, KvSendFailed, PieceArrived, PieceBad, PieceSent, PiecesStopped
from kvferry.common.kv_transfer.interface import KvEvent
from kvferry.common.protocol.messages import Piece
from kvferry.common.ranks.tally import PieceTally
from tests.support.kv_memory import key_between

KEY = key_between(Incarnation("a" * 32), Incarnation("b" * 32))
OTHER = key_between(Incarnation("a" * 32), Incarnation("b" * 32), 2)


def piece(number: int = 0, key: TransferKey = KEY, layers: tuple[int, int] = (0, 2)) -> Piece:
    return Piece(
        key=key, number=number, layer_start=layers[0], layer_end=layers[1], token_start=0, token_end=4, num_bytes=64
    )


def handle(tally: PieceTally, *reports: tuple[int, KvEvent]) -> list[KvEvent]:
    """Handle (rank, event) pairs and check the invariants after each; returns the combined events."""
    combined = []
    for rank, event in reports:
        combined += tally.handle(rank, event)
        tally.check_invariants()
    return combined


def test_a_piece_is_sent_when_every_rank_has_read_its_part() -> None:
    tally = PieceTally(3)
    tally.send(piece())
    assert handle(tally, (2, PieceSent(KEY, 0)), (0, PieceSent(KEY, 0)), (0, PieceSent(KEY, 0))) == []
    assert handle(tally, (1, PieceSent(KEY, 0))) == [PieceSent(KEY, 0)]
    assert len(tally) == 0


def test_a_stop_is_answered_once_when_every_rank_has_stopped() -> None:
    tally = PieceTally(2)
    tally.send(piece(0))
    tally.send(piece(1))
    tally.stop(KEY)
    assert handle(tally, (0, PieceSent(KEY, 0)), (0, PiecesStopped(KEY)), (1, PieceSent(KEY, 1))) == []
    assert handle(tally, (1, PiecesStopped(KEY))) == [PiecesStopped(KEY)]
    assert handle(tally, (1, PieceSent(KEY, 0))) == []
    assert len(tally) == 0


def test_a_stop_without_pieces_is_answered_too() -> None:
    tally = PieceTally(2)
    tally.stop(KEY)
    assert handle(tally, (0, PiecesStopped(KEY)), (1, PiecesStopped(KEY))) == [PiecesStopped(KEY)]
    assert len(tally) == 0


def test_a_rank_that_stops_by_itself_releases_its_part_like_a_requested_stop() -> None:
    """A peer was closed after rank 0 had sent its part and before rank 1 had."""
    tally = PieceTally(2)
    tally.send(piece(0))
    tally.send(piece(1))
    assert handle(tally, (0, PieceSent(KEY, 0)), (1, PiecesStopped(KEY))) == []
    assert handle(tally, (0, PieceSent(KEY, 1))) == [PiecesStopped(KEY)]
    assert len(tally) == 0


def test_a_failure_of_any_rank_is_passed_on() -> None:
    tally = PieceTally(2)
    tally.send(piece())
    for failure in (KvSendFailed(KEY, "the connection broke"), KvFailed("a bug")):
        assert handle(tally, (1, failure)) == [failure]


@pytest.mark.rule(23)
def test_a_piece_has_arrived_when_every_rank_has_written_its_part() -> None:
    for order in itertools.permutations(range(3)):
        tally = PieceTally(3)
        tally.expect(KEY)
        reports = [(rank, PieceArrived(piece())) for rank in order]
        assert handle(tally, *reports[:2]) == []
        assert handle(tally, reports[2]) == [PieceArrived(piece())]
        assert handle(tally, *reports) == [], "a duplicate was counted"


@pytest.mark.rule(23)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_bad_part_makes_the_piece_bad_when_all_have_reported_and_can_be_sent_again(order: tuple[int, ...]) -> None:
    tally = PieceTally(3)
    tally.expect(KEY)
    reports: list[KvEvent] = [PieceArrived(piece()), PieceBad(KEY, 0, "checksum"), PieceBad(KEY, 0, "length")]
    combined = [handle(tally, (rank, reports[rank])) for rank in order]
    assert combined == [[], [], [PieceBad(KEY, 0, "rank 1: checksum")]]
    assert handle(tally, (2, PieceArrived(piece())), (0, PieceArrived(piece()))) == []
    assert handle(tally, (1, PieceArrived(piece()))) == [PieceArrived(piece())]


def test_different_pieces_under_one_number_are_bad() -> None:
    tally = PieceTally(2)
    tally.expect(KEY)
    combined = handle(tally, (0, PieceArrived(piece())), (1, PieceArrived(piece(layers=(0, 3)))))
    assert combined == [PieceBad(KEY, 0, "rank 1: ranks were sent different pieces under one number")]


def test_events_of_a_forgotten_key_are_ignored() -> None:
    tally = PieceTally(2)
    tally.expect(KEY)
    handle(tally, (0, PieceArrived(piece())))
    tally.forget(KEY)
    assert handle(tally, (1, PieceArrived(piece())), (1, PieceBad(KEY, 0, "late"))) == []
    assert len(tally) == 0


@pytest.mark.parametrize("seed", range(50))
def test_in_any_order_each_piece_is_reported_once_and_nothing_is_retained(seed: int) -> None:
    """Two concurrent keys, four ranks that each report in order, one of the keys stopped in the middle."""
    chance = random.Random(seed)
    tally = PieceTally(4)
    reports_of: list[list[KvEvent]] = [[] for _ in range(4)]
    for number in range(5):
        for key in (KEY, OTHER):
            tally.send(piece(number, key))
            for reports in reports_of:
                reports.append(PieceSent(key, number))
    for reports in reports_of:
        reports.insert(chance.randrange(len(reports) + 1), PiecesStopped(OTHER))
    tally.stop(OTHER)
    combined: list[KvEvent] = []
    while any(reports_of):
        rank = chance.choice([rank for rank, reports in enumerate(reports_of) if reports])
        combined += handle(tally, (rank, reports_of[rank].pop(0)))
    assert sorted(event.number for event in combined if isinstance(event, PieceSent) and event.key == KEY) == [
        *range(5)
    ]
    assert combined.count(PiecesStopped(OTHER)) == 1
    assert all(not isinstance(e, PieceSent) or e.key == KEY for e in combined[combined.index(PiecesStopped(OTHER)) :])
    assert len(tally) == 0
