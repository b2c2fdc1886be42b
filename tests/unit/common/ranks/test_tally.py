"""One word of each piece out of those of all ranks, whatever the order in which they come."""

import itertools
import random

import pytest

from kvferry.common.base.ids import (
    Incarnation,
    TransferKey,
)
from kvferry.common.cluster.events import (
    KvFailed,
    KvSendFailed,
    PieceArrived,
    PieceBad,
    PieceSent,
    PiecesStopped,
)
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


def said(tally: PieceTally, *words: tuple[int, KvEvent]) -> list[KvEvent]:
    """What the node hears of (rank, event) pairs; the tally keeps its balance throughout."""
    heard = []
    for rank, event in words:
        heard += tally.handle(rank, event)
        tally.check_invariants()
    return heard


def test_a_piece_is_sent_when_every_rank_has_read_its_part() -> None:
    tally = PieceTally(3)
    tally.send(piece())
    assert said(tally, (2, PieceSent(KEY, 0)), (0, PieceSent(KEY, 0)), (0, PieceSent(KEY, 0))) == []
    assert said(tally, (1, PieceSent(KEY, 0))) == [PieceSent(KEY, 0)]
    assert len(tally) == 0


def test_a_stop_is_answered_once_when_every_rank_has_stopped() -> None:
    tally = PieceTally(2)
    tally.send(piece(0))
    tally.send(piece(1))
    tally.stop(KEY)
    assert said(tally, (0, PieceSent(KEY, 0)), (0, PiecesStopped(KEY)), (1, PieceSent(KEY, 1))) == []
    assert said(tally, (1, PiecesStopped(KEY))) == [PiecesStopped(KEY)]
    assert said(tally, (1, PieceSent(KEY, 0))) == []
    assert len(tally) == 0


def test_a_stop_without_pieces_is_answered_too() -> None:
    tally = PieceTally(2)
    tally.stop(KEY)
    assert said(tally, (0, PiecesStopped(KEY)), (1, PiecesStopped(KEY))) == [PiecesStopped(KEY)]
    assert len(tally) == 0


def test_a_rank_that_drops_its_part_by_itself_lets_go_of_it_like_a_stop() -> None:
    """A peer was closed: rank 0 had sent its part, rank 1 had not."""
    tally = PieceTally(2)
    tally.send(piece(0))
    tally.send(piece(1))
    assert said(tally, (0, PieceSent(KEY, 0)), (1, PiecesStopped(KEY))) == []
    assert said(tally, (0, PieceSent(KEY, 1))) == [PiecesStopped(KEY)]
    assert len(tally) == 0


def test_a_failure_of_any_rank_is_the_nodes() -> None:
    tally = PieceTally(2)
    tally.send(piece())
    for failure in (KvSendFailed(KEY, "the connection broke"), KvFailed("a bug")):
        assert said(tally, (1, failure)) == [failure]


@pytest.mark.rule(23)
def test_a_piece_is_there_when_every_rank_has_written_its_part() -> None:
    for order in itertools.permutations(range(3)):
        tally = PieceTally(3)
        tally.expect(KEY)
        words = [(rank, PieceArrived(piece())) for rank in order]
        assert said(tally, *words[:2]) == []
        assert said(tally, words[2]) == [PieceArrived(piece())]
        assert said(tally, *words) == [], "a second copy was counted"


@pytest.mark.rule(23)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_bad_part_makes_the_piece_bad_once_all_have_spoken_and_is_made_good(order: tuple[int, ...]) -> None:
    tally = PieceTally(3)
    tally.expect(KEY)
    words: list[KvEvent] = [PieceArrived(piece()), PieceBad(KEY, 0, "checksum"), PieceBad(KEY, 0, "length")]
    heard = [said(tally, (rank, words[rank])) for rank in order]
    assert heard == [[], [], [PieceBad(KEY, 0, "rank 1: checksum")]]
    assert said(tally, (2, PieceArrived(piece())), (0, PieceArrived(piece()))) == []
    assert said(tally, (1, PieceArrived(piece()))) == [PieceArrived(piece())]


def test_ranks_that_were_sent_different_pieces_under_one_number_find_it_bad() -> None:
    tally = PieceTally(2)
    tally.expect(KEY)
    heard = said(tally, (0, PieceArrived(piece())), (1, PieceArrived(piece(layers=(0, 3)))))
    assert heard == [PieceBad(KEY, 0, "rank 1: ranks were sent different pieces under one number")]


def test_what_comes_for_a_forgotten_key_means_nothing() -> None:
    tally = PieceTally(2)
    tally.expect(KEY)
    said(tally, (0, PieceArrived(piece())))
    tally.forget(KEY)
    assert said(tally, (1, PieceArrived(piece())), (1, PieceBad(KEY, 0, "late"))) == []
    assert len(tally) == 0


@pytest.mark.parametrize("seed", range(50))
def test_in_any_order_each_piece_is_told_once_and_nothing_is_kept(seed: int) -> None:
    """Two keys at once, four ranks that each speak in order, one of the keys stopped in the middle."""
    chance = random.Random(seed)
    tally = PieceTally(4)
    voices: list[list[KvEvent]] = [[] for _ in range(4)]
    for number in range(5):
        for key in (KEY, OTHER):
            tally.send(piece(number, key))
            for voice in voices:
                voice.append(PieceSent(key, number))
    for voice in voices:
        voice.insert(chance.randrange(len(voice) + 1), PiecesStopped(OTHER))
    tally.stop(OTHER)
    heard: list[KvEvent] = []
    while any(voices):
        rank = chance.choice([rank for rank, voice in enumerate(voices) if voice])
        heard += said(tally, (rank, voices[rank].pop(0)))
    assert sorted(event.number for event in heard if isinstance(event, PieceSent) and event.key == KEY) == [*range(5)]
    assert heard.count(PiecesStopped(OTHER)) == 1
    assert all(not isinstance(e, PieceSent) or e.key == KEY for e in heard[heard.index(PiecesStopped(OTHER)) :])
    assert len(tally) == 0
