"""Runs schedules of every profile on the real cores; the command line runs thousands more."""

import dataclasses

import pytest
from msgspec.structs import replace

from tests.simulation.checks import RECOVERY_S
from tests.simulation.draw import draw_schedule
from tests.simulation.ledger import Tally
from tests.simulation.profiles import PROFILES
from tests.simulation.run import Run, run_schedule
from tests.simulation.schedule import Ask
from tests.simulation.torture import run_seeds

SEEDS_PER_PROFILE = 10
SEEDS_OF_ALL = 60


@pytest.mark.parametrize("profile", [name for name in PROFILES if name not in ("all", "quick")])
def test_schedules_of_one_kind_of_fault(profile):
    for seed in range(SEEDS_PER_PROFILE):
        run_schedule(draw_schedule(seed, profile))


@pytest.mark.parametrize("first", range(0, SEEDS_OF_ALL, 20))
def test_schedules_of_all_faults_together(first):
    for seed in range(first, first + 20):
        run_schedule(draw_schedule(seed, "all"))


@pytest.mark.parametrize(
    ("seed", "profile"),
    [
        pytest.param(11616, "incompatible", id="an incompatible node replaces the sender of missing pieces"),
        pytest.param(20390, "crowded", id="the sender of missing pieces crashes"),
        pytest.param(18243, "pauses", id="a slow engine samples tokens up to the deadline"),
        pytest.param(91032, "swap", id="a piece is damaged late, with swapping"),
        pytest.param(75449, "onesided", id="a piece is damaged late, in staging slots"),
        pytest.param(91554, "full", id="a piece is damaged late, with few blocks"),
    ],
)
def test_no_request_hangs_until_its_deadline(seed, profile):
    run_schedule(draw_schedule(seed, profile))


def test_invariants_hold_after_every_event():
    for seed in range(3):
        run_schedule(draw_schedule(seed, "quick"), check_every=1)


def test_the_same_seed_gives_the_same_events():
    def trace(seed: int) -> list[str]:
        lines: list[str] = []
        run = Run(draw_schedule(seed, "all"))
        run.monitor.also = lambda process, what: lines.append(f"{run.world.loop.now()} {process.host} {what}")
        run.run()
        return lines

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


def test_a_schedule_without_one_of_its_events_is_valid():
    """Shrinking depends on this."""
    schedule = draw_schedule(3, "quick")
    for omitted in range(len(schedule.events)):
        events = schedule.events[:omitted] + schedule.events[omitted + 1 :]
        run_schedule(replace(schedule, events=events))


def test_the_last_probe_waits_for_recovery_from_a_node_that_a_request_crashed():
    """No scheduled event bounds the time of such a crash."""
    schedule = draw_schedule(0, "none", (1, 1, 1))
    ask = next(event for event in schedule.events if isinstance(event, Ask) and event.max_new_tokens > 2)
    nodes = tuple(dataclasses.replace(node, killers=frozenset({ask.seed})) for node in schedule.nodes)
    run = Run(replace(schedule, nodes=nodes, events=(replace(ask, kills=True),)))
    run.run()
    assert run.faults.counts["end: killed by a request"] > 1
    last = run.checkers[min(run.checkers)]
    assert last.must_succeed
    assert last.stream.sent_at >= run.faults.calm_at + RECOVERY_S


FAULTS = {
    "message lost with its connection",
    "message late after its connection",
    "message held by a cut",
    "connection broken",
    "KV connection broken",
    "partition, one way",
    "partition, both ways",
    "KV partition",
    "piece lost",
    "piece damaged",
    "slow host",
    "freeze and thaw",
    "worker stalled",
    "node stalled",
    "engine wedged",
    "end: crash",
    "end: crash at an action",
    "end: drained",
    "end: killed by a request",
    "drain of a node",
    "drain of a worker",
    "restart at the same address",
    "node replaced by an incompatible one",
    "client leaves",
}
ENDS = {
    "stop",
    "length",
    "timeout",
    "cancelled",
    "refused OverloadedError",
    "error GenerationError",
    "error UnavailableError",
    "worker died",
}
MESSAGES = {"Queued", "Refused gone", "Job again", "Gone preempted", "HandoverFailed no_room", "HelloRefused model"}
AT_MOST = 800
"""Bound of the seeds until the rarest fault has occurred; usually 150 suffice."""


def test_every_kind_of_fault_occurs():
    """A schedule that passes proves nothing about a fault that never occurs."""
    tally, missing = Tally(), FAULTS | ENDS | MESSAGES
    for first in range(0, AT_MOST, 10):
        tally.add(run_seeds("each", first, first + 10))
        needed = {"fault": FAULTS, "end of requests": ENDS, "message": MESSAGES}
        missing = {what for title, whats in needed.items() for what in whats - tally.tables[title].keys()}
        if not missing:
            break
    assert missing == set()
    assert tally.failed == []
