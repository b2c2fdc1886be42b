"""The head of a decode node's queue: granted by the very event that makes room, and cheap to try with all others."""

from array import array
from collections import Counter

import pytest
from msgspec.structs import replace

from kvferry.common.kv import block_pool
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.protocol.messages import Abort, Cancel, Granted, Queued, Refused
from kvferry.common.scheduling.admission import Admission
from kvferry.common.scheduling.sequence import SchedulerConfig
from kvferry.common.scheduling.step import StepResult
from tests.unit.decode_node.test_decode import REQUEST, Bench, said
from tests.unit.decode_node.test_decode_ends import OTHERS, make_bench, run, step

HEAD = OTHERS[8]


def ask(bench: Bench, now: float, request=HEAD, prompt=range(50, 56), **changes):
    """Two blocks of four, unless the prompt is another: as many as `run` gives to REQUEST, and no id the same."""
    message = bench.message(bench.key(request=request))
    inner = {name: changes.pop(name) for name in ("priority", "sampling") if name in changes}
    spec = replace(message.spec, prompt_token_ids=array("I", prompt), **inner)
    message = replace(message, spec=spec, **changes)
    return bench.done(bench.role.on_message(bench.prefill, message, now), now)


def granted(actions) -> list[str]:
    return [message.key.request_id for message in said(actions, Granted)]


def wait(bench: Bench, now: float = 0.3, **changes) -> None:
    """The head comes, and finds no room with this event and the next ones."""
    assert [type(message) for message in said(ask(bench, now, **changes), Queued | Granted)] == [Queued]
    for _ in range(3):
        assert bench.role.flush(now) == []


# -- what makes room


def cancel(bench: Bench, now: float, request=REQUEST):
    return bench.done(bench.role.on_message(bench.worker, Cancel(request_id=request, attempt=1), now), now)


def abort(bench: Bench, now: float, request=REQUEST):
    return bench.done(bench.role.on_message(bench.prefill, Abort(key=bench.key(request=request)), now), now)


@pytest.mark.rule(18)
@pytest.mark.parametrize("way", ["cancelled", "finished", "failed", "preempted", "lost"])
def test_granted_as_soon_as_what_decodes_is_over(way: str):
    bench = make_bench(num_blocks=3, config=SchedulerConfig(watermark_blocks_share=0.0))
    run(bench)
    wait(bench)
    match way:
        case "cancelled":
            actions = cancel(bench, 0.4)
        case "finished":
            assert [granted(step(bench, now)) for now in (0.4, 0.5)] == [[], []]
            actions = step(bench, 0.6)
        case "failed":
            actions = step(bench, 0.4, failed="not a number")
        case "preempted":
            actions = bench.done(bench.role.preempt_all(0.4), 0.4)
        case _:
            actions = bench.done(bench.role.entries.lose(bench.role.entries.by_key[bench.key()], "lost", 0.4), 0.4)
    assert granted(actions) == [HEAD]


@pytest.mark.rule(18)
@pytest.mark.parametrize(
    ("way", "num_blocks", "share"),
    [("aborted", 3, 1.0), ("aborted", 6, 0.5), ("not used", 3, 1.0), ("not used", 6, 0.5), ("committed", 6, 0.5)],
)
def test_granted_as_soon_as_another_grant_is_none_any_more(way: str, num_blocks: int, share: float):
    """By blocks, or by the share that grants without a Commit may have."""
    bench = make_bench(num_blocks, SchedulerConfig(reserved_share=share))
    bench.reserve(0.1)
    wait(bench)
    match way:
        case "aborted":
            actions = abort(bench, 0.4)
        case "committed":
            actions = bench.commit(0.4)
        case "not used":
            actions = bench.done(bench.role.tick(9.0), 9.0)
    assert granted(actions) == [HEAD]


def test_blocks_of_a_step_in_flight_make_room_when_it_is_back():
    bench = make_bench(num_blocks=3)
    run(bench)
    wait(bench)
    plan = bench.role.context.scheduler.schedule(0.4).plan
    assert plan is not None
    assert granted(cancel(bench, 0.4)) == []
    bench.role.context.scheduler.apply(StepResult(plan.step_id, {part.seq_id: 7 for part in plan.scheduled}), 0.5)
    assert granted(bench.done([], 0.5)) == [HEAD]


def test_the_watermark_makes_room_when_nothing_decodes_any_more():
    """Before the blocks come that a step in flight still writes."""
    bench = make_bench(num_blocks=5, config=SchedulerConfig(watermark_blocks_share=0.4))
    run(bench)
    wait(bench)
    assert bench.role.context.scheduler.schedule(0.4).plan is not None
    actions = cancel(bench, 0.4)
    assert bench.pool.num_releases == 0
    assert granted(actions) == [HEAD]


def test_max_running_makes_room_when_one_is_over():
    bench = make_bench(num_blocks=16, config=SchedulerConfig(max_running=1))
    run(bench)
    wait(bench)
    assert granted(cancel(bench, 0.4)) == [HEAD]


def test_another_head_is_tried_though_the_one_before_found_no_room():
    bench = make_bench(num_blocks=4)
    run(bench)
    wait(bench, prompt=range(50, 60))
    small = ask(bench, 0.4, OTHERS[1], range(70, 73), priority=1)
    assert granted(small) == [OTHERS[1]]
    wait(bench, 0.5, request=OTHERS[2], prompt=range(70, 73))
    assert granted(cancel(bench, 0.6, HEAD)) == []


# -- what a try costs


def test_ids_of_a_waiting_head_are_checked_and_hashed_once(monkeypatch):
    """Each event tries the head, and its ids may be a million."""
    counts: Counter[str] = Counter()

    def count(owner: object, name: str) -> None:
        right = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return right(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    bench = make_bench(num_blocks=20, config=SchedulerConfig(reserved_share=1.0))
    bench.pool.acquire(-1, array("I", range(50, 90)), max_cached_tokens=0)
    bench.pool.publish(-1, array("I", range(50, 90)), 40)
    bench.pool.release(-1)  # ten cached blocks
    for number, prompt in enumerate((range(3), range(3), range(200, 231))):
        ask(bench, 0.1, OTHERS[number], prompt)
    bench.commit(0.2, key=bench.key(request=OTHERS[2]))
    assert bench.pool.num_free == 10
    count(Admission, "check")
    count(BlockPool, "_lookup")
    count(block_pool, "chain_bytes")
    wait(bench, prompt=range(50, 96))  # twelve blocks, of which eleven are whole
    assert counts == {"check": 1, "_lookup": 1, "chain_bytes": 11}
    assert granted(abort(bench, 0.4, OTHERS[0])) == []
    assert bench.role.flush(0.4) == []
    assert counts == {"check": 1, "_lookup": 2, "chain_bytes": 11}, "one block more: looked up again, not hashed"
    assert granted(abort(bench, 0.5, OTHERS[1])) == [HEAD]
    assert counts == {"check": 1, "_lookup": 3, "chain_bytes": 11}


# -- what is not right is no head


@pytest.mark.rule(18)
@pytest.mark.parametrize(("prompt", "why"), [([1, 99], "outside the vocabulary"), (range(40), "KV blocks")])
def test_what_could_never_run_is_refused_immediately_though_others_wait(prompt, why: str):
    """Not when its turn comes: it could not be refused then, and the node would end."""
    bench = make_bench(num_blocks=3, config=SchedulerConfig(vocab_size=99))
    run(bench)
    wait(bench)
    (refused,) = said(ask(bench, 0.4, OTHERS[1], prompt), Refused)
    assert why in refused.reason
    assert granted(cancel(bench, 0.5)) == [HEAD]
    assert granted(cancel(bench, 0.6, HEAD)) == []
