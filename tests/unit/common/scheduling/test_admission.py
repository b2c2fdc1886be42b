"""Who starts: all or nothing, in the queue's order, within the bounds."""

from array import array
from dataclasses import replace

import pytest

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.protocol.messages import NodeLoad
from kvferry.common.scheduling.events import Started
from kvferry.common.scheduling.sequence import SchedulerConfig, SequenceStatus
from tests.support.scheduling import FakeNode, make_spec


def node_with(num_blocks: int, **settings) -> FakeNode:
    defaults = {"max_running": 8, "max_step_tokens": 64}
    return FakeNode(SchedulerConfig(**{**defaults, **settings}), num_blocks=num_blocks)


@pytest.mark.rule(18)
def test_a_prompt_starts_only_with_blocks_for_all_its_tokens_and_the_next():
    node = node_with(4)
    big = node.scheduler.add(make_spec(8, max_new_tokens=4), 0.0)  # 2 blocks, the next token needs a third
    small = node.scheduler.add(make_spec(range(50, 54), max_new_tokens=2), 0.0)  # 1 block + 1
    node.step()
    assert node.scheduler.status(big) is SequenceStatus.DECODING
    assert len(node.scheduler.block_table(big)) == 3
    assert node.scheduler.status(small) is SequenceStatus.WAITING
    assert node.scheduler.block_table(small) == ()


def test_the_next_token_needs_no_block_when_it_is_the_last():
    node = node_with(2)
    node.scheduler.add(make_spec(8, max_new_tokens=1), 0.0)
    node.run()
    assert node.scheduler.is_quiescent()


def test_a_head_that_does_not_fit_holds_back_what_is_behind_it():
    node = node_with(8)
    holder = node.scheduler.add(make_spec(10, max_new_tokens=12), 0.0)
    node.step()
    big = node.scheduler.add(make_spec(range(50, 74), max_new_tokens=2, accepted_at=1.0), 1.0)
    small = node.scheduler.add(make_spec([9], max_new_tokens=2, accepted_at=2.0), 2.0)
    node.step(2.0)
    assert node.scheduler.status(small) is SequenceStatus.WAITING
    assert node.scheduler.status(big) is SequenceStatus.WAITING
    while node.scheduler.status(holder) is not None:
        node.step(2.0)
    node.step(2.0)
    assert node.of(big, Started) != []


def test_a_better_class_passes_a_head_that_does_not_fit():
    node = node_with(8)
    node.scheduler.add(make_spec(10, max_new_tokens=12), 0.0)
    node.step()
    node.scheduler.add(make_spec(range(50, 74), max_new_tokens=2), 0.0)
    node.step()
    urgent = node.scheduler.add(make_spec([9], max_new_tokens=2, priority=1), 0.0)
    node.step()
    assert node.of(urgent, Started) != []


def test_a_stream_of_small_prompts_does_not_starve_a_big_one():
    node = node_with(8)
    node.scheduler.add(make_spec(4, max_new_tokens=3), 0.0)
    node.step()
    big = node.scheduler.add(make_spec(range(100, 130), max_new_tokens=2, accepted_at=0.5), 0.5)
    for count in range(20):
        now = 1.0 + count
        node.scheduler.add(make_spec([count, 7, 8], max_new_tokens=3, accepted_at=now), now)
        node.step(now)
        if node.of(big, Started):
            break
    assert count < 5


def test_a_refused_head_starts_after_a_release():
    node = node_with(8)
    holder = node.scheduler.add(make_spec(24, max_new_tokens=3, mode="prefill"), 0.0)
    node.step()
    waiting = node.scheduler.add(make_spec(range(50, 60), max_new_tokens=3, mode="prefill"), 0.0)
    for _ in range(3):
        node.schedule()
    assert node.scheduler.status(waiting) is SequenceStatus.WAITING
    node.scheduler.release(holder)
    node.step()
    assert node.scheduler.status(waiting) is SequenceStatus.PREFILLED


def test_the_gate_holds_the_head_and_all_behind_it():
    node = node_with(16)
    asked = []
    first = node.scheduler.add(make_spec(5, max_new_tokens=4), 0.0)
    node.scheduler.add(make_spec([9], max_new_tokens=4), 0.0)

    def shut(spec) -> bool:
        asked.append(spec.num_known)
        return False

    assert node.schedule(may_start=shut) is None
    assert asked == [5]
    assert node.scheduler.num_waiting == 2
    assert not node.scheduler.work_waiting, "a shut gate is not a stuck engine"
    assert node.schedule(may_start=lambda spec: spec.num_known == 5) is not None
    assert node.scheduler.status(first) is SequenceStatus.COMPUTING
    assert node.scheduler.num_waiting == 1


def test_max_running_bounds_what_runs_but_not_what_is_prefilled():
    node = node_with(64, max_running=2)
    prefilled = node.scheduler.add(make_spec(3, mode="prefill"), 0.0)
    node.step()
    assert node.scheduler.status(prefilled) is SequenceStatus.PREFILLED
    running = [node.scheduler.add(make_spec(range(k, k + 3), max_new_tokens=3), 0.0) for k in (10, 20, 30)]
    node.step()
    assert [node.scheduler.status(seq_id) for seq_id in running] == [
        SequenceStatus.DECODING,
        SequenceStatus.DECODING,
        SequenceStatus.WAITING,
    ]
    assert node.scheduler.reserve(make_spec([1, 2]), 0.0) is None


@pytest.mark.rule(28)
def test_the_watermark_is_kept_only_while_something_decodes():
    node = node_with(10, watermark_blocks_share=0.25)  # rounded up: 3 blocks
    first = node.scheduler.add(make_spec(6, max_new_tokens=6), 0.0)
    node.step()
    assert len(node.scheduler.block_table(first)) == 2
    assert node.scheduler.reserve(make_spec(range(50, 73), max_new_tokens=4), 0.0) is None  # 6 of 8 free
    second = node.scheduler.add(make_spec(range(50, 73), max_new_tokens=4), 0.0)
    node.step()
    assert node.scheduler.status(second) is SequenceStatus.WAITING
    assert node.scheduler.reserve(make_spec(range(50, 68), max_new_tokens=4), 0.0) is not None  # 5 of 8
    node.scheduler.abort(first)
    node.schedule()
    assert node.scheduler.status(second) is SequenceStatus.WAITING, "five reserved, six needed"


@pytest.mark.parametrize("spec", [
    make_spec([], max_new_tokens=4),
    replace(make_spec(4), num_prompt_tokens=5),
    replace(make_spec(4), token_ids=array("L", [1, 2, 3, 4])),
    make_spec(4, priority=0),
    make_spec(4, priority=6),
    make_spec(4, [1, 2], max_new_tokens=2),
    make_spec(12, max_new_tokens=6),
    make_spec(17, max_new_tokens=1, mode="prefill"),
    make_spec(16, max_new_tokens=2, mode="prefill"),
], ids=str)  # fmt: skip
def test_what_could_never_run_here_is_refused(spec):
    node = node_with(4)
    with pytest.raises(RequestInvalidError):
        node.scheduler.add(spec, 0.0)
    with pytest.raises(RequestInvalidError):
        node.scheduler.check(spec)
    assert node.scheduler.is_quiescent()


def test_what_just_fits_is_taken():
    node = node_with(4)
    node.scheduler.add(make_spec(12, max_new_tokens=5), 0.0)
    node.scheduler.add(make_spec(range(50, 65), max_new_tokens=99, mode="prefill"), 0.0)
    node.run()
    assert node.scheduler.load().running_requests == 1
    with pytest.raises(RequestInvalidError):
        node.scheduler.check(make_spec(range(50, 65), max_new_tokens=99, mode="prefill"))


def test_load_tells_the_truth():
    node = node_with(32, max_step_tokens=8, reserved_share=0.9)
    assert node.scheduler.load() == NodeLoad(total_blocks=32, free_blocks=32, block_size=4)
    node.scheduler.add(make_spec(5, max_new_tokens=9), 0.0)
    node.step()
    node.scheduler.add(make_spec(range(50, 60)), 0.0)
    node.step()
    node.scheduler.add(make_spec(range(70, 76)), 0.0)
    reserved = node.scheduler.reserve(make_spec(range(90, 97)), 0.0)
    committed = node.scheduler.reserve(make_spec(range(190, 197)), 0.0)
    assert reserved is not None
    assert committed is not None
    node.scheduler.commit(committed.seq_id)
    assert node.scheduler.load() == NodeLoad(
        waiting_requests=1,
        waiting_tokens=6 + 3,  # one queued, one with 7 of 10 done
        running_requests=3,
        total_blocks=32,
        free_blocks=32 - 2 - 3 - 2 - 2,
        reserved_blocks=2,
        block_size=4,
        prompt_tokens=5 + 10 + 7 + 7,
    )


@pytest.mark.parametrize("known", [([1, 199], []), ([1], [2**32 - 1])])
def test_an_id_outside_the_vocabulary_is_refused_wherever_it_comes_in(known: tuple[list[int], list[int]]):
    """The engine would fail at it, and all others of its node with it."""
    node = node_with(8, vocab_size=199)
    present = node.scheduler.add(make_spec([198]), 0.0)
    wrong = make_spec(*known)
    for come in (
        node.scheduler.add,
        lambda spec, _: node.scheduler.check(spec),
        lambda spec, now: node.scheduler.inherit_blocks(present, spec, now),
    ):
        with pytest.raises(RequestInvalidError, match=r"outside the vocabulary \[0, 199\)"):
            come(wrong, 0.0)
    assert node.scheduler.live_ids == (present,)
