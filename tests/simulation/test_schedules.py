"""Schedules of every profile through the real cores; the command line runs thousands more."""

import dataclasses

import pytest
from msgspec.structs import replace

from tests.simulation.checks import RECOVERY_S
from tests.simulation.draw import draw_plan
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
        run_schedule(draw_plan(seed, profile))


@pytest.mark.parametrize("first", range(0, SEEDS_OF_ALL, 20))
def test_schedules_of_all_faults_together(first):
    for seed in range(first, first + 20):
        run_schedule(draw_plan(seed, "all"))


@pytest.mark.parametrize(
    ("seed", "profile"),
    [
        pytest.param(11616, "incompatible", id="the sender of missing pieces gives way to an incompatible node"),
        pytest.param(20390, "crowded", id="the sender of missing pieces crashes"),
        pytest.param(18243, "pauses", id="a slow engine draws tokens up to the deadline"),
        pytest.param(91032, "swap", id="a piece is damaged late, with swapping"),
        pytest.param(75449, "onesided", id="a piece is damaged late, in staging slots"),
        pytest.param(91554, "full", id="a piece is damaged late, with few blocks"),
    ],
)
def test_no_request_hangs_until_its_deadline(seed, profile):
    run_schedule(draw_plan(seed, profile))


def test_cores_keep_their_invariants_after_every_single_event():
    for seed in range(3):
        run_schedule(draw_plan(seed, "quick"), check_every=1)


def test_the_same_seed_is_the_same_run_to_the_last_event():
    def story(seed: int) -> list[str]:
        seen: list[str] = []
        run = Run(draw_plan(seed, "all"))
        run.monitor.also = lambda process, what: seen.append(f"{run.world.loop.now()} {process.host} {what}")
        run.run()
        return seen

    assert story(7) == story(7)
    assert story(7) != story(8)


def test_a_schedule_without_one_of_its_events_is_a_schedule_too():
    """Shrinking depends on this."""
    schedule = draw_plan(3, "quick")
    for leave_out in range(len(schedule.events)):
        events = schedule.events[:leave_out] + schedule.events[leave_out + 1 :]
        run_schedule(replace(schedule, events=events))


def test_nothing_has_to_succeed_until_all_have_recovered_from_the_last_node_that_a_request_ended():
    """It comes as late as it likes: no other event says when that will be."""
    schedule = draw_plan(0, "none", (1, 1, 1))
    ask = next(event for event in schedule.events if isinstance(event, Ask) and event.max_new_tokens > 2)
    nodes = tuple(dataclasses.replace(node, killers=frozenset({ask.seed})) for node in schedule.nodes)
    run = Run(replace(schedule, nodes=nodes, events=(replace(ask, kills=True),)))
    run.run()
    assert run.faults.counts["end: killed by a request"] > 1
    last = run.judges[min(run.judges)]
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
"""Seeds of all profiles until the rarest has occurred; 150 are enough as a rule."""


def test_every_kind_of_trouble_happens():
    """Else a schedule without complaint would say nothing of it."""
    tally, missing = Tally(), FAULTS | ENDS | MESSAGES
    for first in range(0, AT_MOST, 10):
        tally.add(run_seeds("each", first, first + 10))
        needed = {"fault": FAULTS, "end of requests": ENDS, "message": MESSAGES}
        missing = {what for title, whats in needed.items() for what in whats - tally.tables[title].keys()}
        if not missing:
            break
    assert missing == set()
    assert tally.failed == []
