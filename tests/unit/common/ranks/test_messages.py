"""Messages between ranks: round trips, and errors for gaps, duplicates and malformed frames."""

from array import array

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import new_incarnation
from kvferry.common.cluster.events import KvSendFailed, PieceArrived, PieceBad, PieceSent, PiecesStopped
from kvferry.common.ranks.link import Outbound, PieceEvent, event_of, from_lead, from_rank, report_of
from kvferry.common.ranks.messages import (
    Arrived,
    Bad,
    ComputeStep,
    Done,
    ExpectKv,
    FromRank,
    Loaded,
    PieceHeader,
    Quit,
    RankFailed,
    Ready,
    SendKv,
    ToRank,
)
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch
from tests.support.kv_memory import MemoryCache, key_between, piece_of

KEY = key_between(new_incarnation(), new_incarnation())
HEADER = PieceHeader.of(piece_of(MemoryCache(), KEY, 3, layers=(0, 2), tokens=(4, 8)))
BATCH = StepBatch(7, (ScheduledSequence(3, array("I", [1, 0xFFFFFFFF]), 5, (4, 2), True, 7),))
TO_RANK: list[ToRank] = [ComputeStep(BATCH), SendKv(HEADER, (1, 2)), ExpectKv(9, KEY, (1,), 4), Quit()]
FROM_RANK: list[FromRank] = [
    Loaded(1 << 40), Ready("tcp://127.0.0.1:1"), Done(9), Arrived(HEADER), Bad(KEY, 3, "checksum"),
    RankFailed("no memory"),
]  # fmt: skip


def test_messages_are_decoded_unchanged() -> None:
    to_rank, at_rank = Outbound[ToRank](), from_lead()
    assert [at_rank.message(to_rank.frames(message)) for message in TO_RANK] == TO_RANK
    to_lead, at_lead = Outbound[FromRank](), from_rank()
    assert [at_lead.message(to_lead.frames(message)) for message in FROM_RANK] == FROM_RANK


@pytest.mark.parametrize(
    "event",
    [
        PieceSent(KEY, 3),
        PiecesStopped(KEY),
        KvSendFailed(KEY, "reset"),
        PieceArrived(HEADER.piece()),
        PieceBad(KEY, 3, "checksum"),
    ],
)
def test_kv_events_survive_the_link(event: PieceEvent) -> None:
    assert event_of(from_rank().message(Outbound[FromRank]().frames(report_of(event)))) == event  # type: ignore[arg-type]


def test_a_header_keeps_all_of_a_piece_but_its_bytes() -> None:
    piece = piece_of(MemoryCache(), KEY, 3, layers=(0, 2), tokens=(4, 8))
    assert PieceHeader.of(piece).piece() == piece


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_gap_or_a_duplicate_is_an_error(skipped: int) -> None:
    outbound, inbound = Outbound[ToRank](), from_lead()
    first, second, third = (outbound.frames(Quit()) for _ in range(3))
    inbound.message(first)
    with pytest.raises(InvariantError, match="was due"):
        inbound.message([first, second, third][skipped])


@pytest.mark.parametrize("frames", [[], [b"\1" + bytes(7)], [b"\1" + bytes(7), b"\xc1"], [b"\1" + bytes(7), b"\x80"]])
def test_malformed_frames_are_an_error(frames: list[bytes]) -> None:
    with pytest.raises(InvariantError, match="between ranks"):
        from_lead().message(frames)
