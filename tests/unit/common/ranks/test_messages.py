"""What ranks say to one another comes back as it was said, each message once and in order, or not at all."""

from array import array

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import new_incarnation
from kvferry.common.ranks.messages import (
    Arrived,
    Bad,
    Done,
    ExpectKv,
    FromRank,
    Loaded,
    Outbound,
    PieceHeader,
    Quit,
    RankFailed,
    Ready,
    RunPlan,
    SendKv,
    ToRank,
    from_lead,
    from_rank,
)
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch
from tests.support.kv_memory import MemoryCache, key_between, piece_of

KEY = key_between(new_incarnation(), new_incarnation())
HEADER = PieceHeader.of(piece_of(MemoryCache(), KEY, 3, layers=(0, 2), tokens=(4, 8)))
PLAN = StepBatch(7, (ScheduledSequence(3, array("I", [1, 0xFFFFFFFF]), 5, (4, 2), True, 7),))
TO_RANK: list[ToRank] = [RunPlan(PLAN), SendKv(HEADER, (1, 2)), ExpectKv(9, KEY, (1,), 4), Quit()]
FROM_RANK: list[FromRank] = [
    Loaded(1 << 40), Ready("tcp://127.0.0.1:1"), Done(9), Arrived(HEADER), Bad(KEY, 3, "checksum"),
    RankFailed("no memory"),
]  # fmt: skip


def test_messages_come_back_as_they_were_said() -> None:
    to_rank, heard = Outbound[ToRank](), from_lead()
    assert [heard.message(to_rank.frames(message)) for message in TO_RANK] == TO_RANK
    to_lead, heard_by_lead = Outbound[FromRank](), from_rank()
    assert [heard_by_lead.message(to_lead.frames(message)) for message in FROM_RANK] == FROM_RANK


def test_a_piece_keeps_all_but_its_bytes() -> None:
    piece = piece_of(MemoryCache(), KEY, 3, layers=(0, 2), tokens=(4, 8))
    assert PieceHeader.of(piece).piece() == piece


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_gap_or_a_second_copy_is_an_error(skipped: int) -> None:
    outgoing, heard = Outbound[ToRank](), from_lead()
    first, second, third = (outgoing.frames(Quit()) for _ in range(3))
    heard.message(first)
    with pytest.raises(InvariantError, match="was due"):
        heard.message([first, second, third][skipped])


@pytest.mark.parametrize("frames", [[], [b"\1" + bytes(7)], [b"\1" + bytes(7), b"\xc1"], [b"\1" + bytes(7), b"\x80"]])
def test_what_is_no_message_is_an_error(frames: list[bytes]) -> None:
    with pytest.raises(InvariantError, match="between ranks"):
        from_lead().message(frames)
