"""The launcher's state machine, with a manual clock."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.base.clock import ManualClock
from kvferry.common.base.errors import InvariantError
from kvferry.ops.launcher.core import (
    AnnounceReady,
    ChildExited,
    ChildPlan,
    Event,
    FinishLaunch,
    KillChild,
    LauncherCore,
    LogLine,
    Phase,
    ReadySeen,
    Stage,
    StartChild,
    StopRequested,
    TerminateChild,
    Tick,
)
from kvferry.ops.launcher.restart_policy import RestartLimits, RestartPolicy

LIMITS = RestartLimits(min_s=0.5, max_s=4.0, healthy_after_s=10.0)
PLANS = [
    ChildPlan("proxy", Stage.PROXY, 5),
    ChildPlan("router", Stage.ROUTER, 30),
    ChildPlan("prefill-0", Stage.PREFILL, 20),
    ChildPlan("decode-0", Stage.DECODE, 20),
    ChildPlan("decode-1", Stage.DECODE, 20),
]


class Launcher:
    """A core with its clock; checks invariants after every event and collects the log lines separately."""

    def __init__(self, plans=PLANS):
        self.core = LauncherCore(plans, LIMITS)
        self.clock = ManualClock()
        self.log: list[str] = []
        self.first_actions = self.core.begin(self.clock.now())

    def send(self, event: Event):
        actions = self.core.handle(event, self.clock.now())
        self.core.check_invariants()
        self.log += [action.text for action in actions if isinstance(action, LogLine)]
        return [action for action in actions if not isinstance(action, LogLine)]

    def tick(self, seconds: float):
        self.clock.advance(seconds)
        return self.send(Tick())


def test_the_restart_delay_doubles_with_quick_deaths_and_is_reset_by_a_long_run():
    policy, clock, waits = RestartPolicy(LIMITS), ManualClock(), []
    for lived_s in (1, 1, 1, 1, 1, 10, 1):
        policy.started(clock.now())
        clock.advance(lived_s)
        waits.append(policy.died(clock.now()) - clock.now())
        policy.check_invariants()
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 0.5, 1.0]


def test_many_deaths_do_not_overflow_the_delay():
    policy = RestartPolicy(LIMITS)
    for _ in range(5000):
        policy.started(0.0)
        assert policy.died(0.0) <= LIMITS.max_s


def test_an_exit_without_a_start_violates_an_invariant():
    with pytest.raises(InvariantError):
        RestartPolicy(LIMITS).died(0.0)


def test_all_children_start_together_and_ready_is_announced_once():
    launcher = Launcher()
    assert launcher.first_actions == [StartChild(plan.name) for plan in PLANS]
    assert launcher.send(ReadySeen()) == [AnnounceReady()]
    assert launcher.send(ReadySeen()) == []
    assert launcher.core.next_wakeup() is None


@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_child_that_exits_in_service_is_restarted_after_its_delay(code: int):
    launcher = Launcher()
    launcher.send(ReadySeen())
    launcher.clock.advance(60)
    assert launcher.send(ChildExited("decode-0", code)) == []
    assert launcher.core.next_wakeup() == 60.5
    assert launcher.tick(0.25) == []
    assert launcher.tick(0.25) == [StartChild("decode-0")]
    assert launcher.core.next_wakeup() is None


def test_a_child_that_cannot_start_ends_the_cluster_with_its_error():
    launcher = Launcher()
    assert launcher.send(ChildExited("prefill-0", 1, "no such file")) == [TerminateChild("router")]
    assert launcher.send(ChildExited("router", 0)) == [TerminateChild("decode-0"), TerminateChild("decode-1")]
    assert launcher.send(ChildExited("decode-1", -15)) == []
    assert launcher.send(ChildExited("decode-0", -15)) == [TerminateChild("proxy")]
    assert launcher.send(ChildExited("proxy", 0)) == [FinishLaunch("prefill-0 could not start: no such file")]
    assert launcher.core.phase is Phase.OVER


def test_an_error_that_children_share_is_reported_once_without_command_names():
    launcher = Launcher([PLANS[2], *PLANS[3:]])
    launcher.send(ChildExited("prefill-0", 2, "kvferry prefill: error: a.b: wrong"))
    launcher.send(ChildExited("decode-0", 2, "kvferry decode: error: a.b: wrong"))
    end = launcher.send(ChildExited("decode-1", 2, "kvferry decode: error: another"))
    assert end == [FinishLaunch("prefill-0 could not start: a.b: wrong", True)]
    assert launcher.log == ["decode-1: another"]


def test_the_error_of_a_child_in_service_or_during_the_stop_is_logged():
    launcher = Launcher([PLANS[3], PLANS[4]])
    launcher.send(ReadySeen())
    launcher.send(ChildExited("decode-0", 1, "kvferry decode: error: lost"))
    assert launcher.log == ["decode-0 exited with code 1: lost; restarting it in 0.5 s"]
    launcher.send(StopRequested())
    launcher.send(ChildExited("decode-1", 1, "kvferry decode: error: stuck"))
    assert launcher.log[-1] == "decode-1: stuck"


def test_exit_code_2_of_a_child_means_a_wrong_configuration():
    launcher = Launcher([PLANS[1]])
    assert launcher.send(ChildExited("router", 2, "a.b: wrong")) == [
        FinishLaunch("router could not start: a.b: wrong", True)
    ]


def test_a_child_that_is_killed_while_starting_is_retried_some_times():
    launcher = Launcher([PLANS[1]])
    for _ in range(4):
        assert launcher.send(ChildExited("router", -9)) == []
        assert launcher.tick(4.0) == [StartChild("router")]
    assert launcher.send(ChildExited("router", -9)) == [FinishLaunch("router could not start: was killed by signal 9")]


def test_a_sigbus_is_explained():
    launcher = Launcher()
    launcher.send(ReadySeen())
    launcher.send(ChildExited("decode-0", -signal.SIGBUS))
    assert "was killed by SIGBUS: a file that it maps (weights?) was truncated while in use" in launcher.log[-1]


@pytest.mark.rule(37)
def test_an_orderly_stop_goes_router_prefill_decode_proxy():
    launcher = Launcher()
    launcher.send(ReadySeen())
    assert launcher.send(StopRequested()) == [TerminateChild("router")]
    assert launcher.send(ChildExited("router", 0)) == [TerminateChild("prefill-0")]
    assert launcher.send(ChildExited("decode-1", -11)) == [], (
        "a child of a later stage that crashes is not restarted, and not waited for"
    )
    assert launcher.send(ChildExited("prefill-0", 0)) == [TerminateChild("decode-0")]
    assert launcher.send(ChildExited("decode-0", 0)) == [TerminateChild("proxy")]
    assert launcher.send(ChildExited("proxy", 0)) == [FinishLaunch("")]


def test_a_child_that_does_not_stop_in_time_is_killed_and_the_stop_continues():
    launcher = Launcher()
    launcher.send(StopRequested())
    assert launcher.core.next_wakeup() == 30
    assert launcher.tick(29) == []
    assert launcher.tick(1) == [KillChild("router")]
    assert launcher.core.next_wakeup() is None
    assert launcher.send(ChildExited("router", -9)) == [TerminateChild("prefill-0")]


def test_a_second_stop_request_kills_all_and_a_third_does_nothing():
    launcher = Launcher()
    launcher.send(StopRequested())
    assert launcher.send(StopRequested()) == [KillChild(plan.name) for plan in PLANS]
    assert launcher.send(StopRequested()) == []
    for plan in PLANS[:-1]:
        assert launcher.send(ChildExited(plan.name, -9)) == []
    assert launcher.send(ChildExited("decode-1", -9)) == [FinishLaunch("stopped before all children had drained")]


def test_a_stop_cancels_pending_restarts():
    launcher = Launcher()
    launcher.send(ReadySeen())
    launcher.send(ChildExited("router", -9))
    assert launcher.send(StopRequested()) == [TerminateChild("prefill-0")]
    assert TerminateChild("router") not in launcher.tick(10)


def test_ready_is_not_announced_during_a_stop():
    launcher = Launcher()
    launcher.send(StopRequested())
    assert launcher.send(ReadySeen()) == []


def test_a_second_exit_violates_an_invariant():
    launcher = Launcher()
    launcher.send(ChildExited("router", -9))
    with pytest.raises(InvariantError):
        launcher.send(ChildExited("router", -9))


def test_two_children_with_one_name_violate_an_invariant():
    with pytest.raises(InvariantError):
        LauncherCore([PLANS[0], PLANS[0]], LIMITS)


@given(st.lists(st.integers(0, 9), max_size=60))
def test_after_any_events_no_child_runs_at_the_end(choices: list[int]):
    """Random events, then a stop: FinishLaunch comes exactly once, with no child running, and none starts after it."""
    launcher = Launcher()
    running = {plan.name for plan in PLANS}
    finished: list[FinishLaunch] = []
    stopped = False

    def perform(actions):
        for action in actions:
            match action:
                case StartChild(name):
                    assert not stopped
                    running.add(name)
                case FinishLaunch():
                    assert not running
                    finished.append(action)
                case TerminateChild(name) | KillChild(name):
                    assert name in running

    for choice in choices:
        if choice < len(PLANS) and PLANS[choice].name in running:
            running.discard(PLANS[choice].name)
            perform(launcher.send(ChildExited(PLANS[choice].name, -9)))
        elif choice == 7:
            stopped = True
            perform(launcher.send(StopRequested()))
        elif choice == 8:
            perform(launcher.send(ReadySeen()))
        else:
            perform(launcher.tick(1.0))
        stopped = stopped or launcher.core.phase in (Phase.STOPPING, Phase.KILLING, Phase.OVER)
    stopped = True
    perform(launcher.send(StopRequested()))
    for name in sorted(running):
        running.discard(name)
        perform(launcher.send(ChildExited(name, -15)))
    assert len(finished) == 1
    assert launcher.core.phase is Phase.OVER
