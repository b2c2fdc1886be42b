"""What the launcher decides, with a clock driven by hand."""

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
    Phase,
    ReadySeen,
    Stage,
    StartChild,
    StopRequested,
    Tell,
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
    """A core with its clock; checks its invariants after every event and keeps the talk apart."""

    def __init__(self, plans=PLANS):
        self.core = LauncherCore(plans, LIMITS)
        self.clock = ManualClock()
        self.told: list[str] = []
        self.begun = self.core.begin(self.clock.now())

    def send(self, event: Event):
        actions = self.core.handle(event, self.clock.now())
        self.core.check_invariants()
        self.told += [action.text for action in actions if isinstance(action, Tell)]
        return [action for action in actions if not isinstance(action, Tell)]

    def tick(self, seconds: float):
        self.clock.advance(seconds)
        return self.send(Tick())


def test_a_wait_doubles_with_every_quick_death_and_starts_again_after_a_long_life():
    policy, clock, waits = RestartPolicy(LIMITS), ManualClock(), []
    for lived_s in (1, 1, 1, 1, 1, 10, 1):
        policy.started(clock.now())
        clock.advance(lived_s)
        waits.append(policy.died(clock.now()) - clock.now())
        policy.check_invariants()
    assert waits == [0.5, 1.0, 2.0, 4.0, 4.0, 0.5, 1.0]


def test_many_deaths_do_not_overflow():
    policy = RestartPolicy(LIMITS)
    for _ in range(5000):
        policy.started(0.0)
        assert policy.died(0.0) <= LIMITS.max_s


def test_a_death_without_a_start_is_a_bug():
    with pytest.raises(InvariantError):
        RestartPolicy(LIMITS).died(0.0)


def test_all_start_at_once_and_ready_is_told_once():
    launcher = Launcher()
    assert launcher.begun == [StartChild(plan.name) for plan in PLANS]
    assert launcher.send(ReadySeen()) == [AnnounceReady()]
    assert launcher.send(ReadySeen()) == []
    assert launcher.core.next_wakeup() is None


@pytest.mark.parametrize("code", [0, 1, -9])
def test_a_child_that_dies_in_service_starts_again_after_its_wait(code: int):
    launcher = Launcher()
    launcher.send(ReadySeen())
    launcher.clock.advance(60)
    assert launcher.send(ChildExited("decode-0", code)) == []
    assert launcher.core.next_wakeup() == 60.5
    assert launcher.tick(0.25) == []
    assert launcher.tick(0.25) == [StartChild("decode-0")]
    assert launcher.core.next_wakeup() is None


def test_a_child_that_cannot_start_ends_everything_with_its_own_words():
    launcher = Launcher()
    assert launcher.send(ChildExited("prefill-0", 1, "no such file")) == [TerminateChild("router")]
    assert launcher.send(ChildExited("router", 0)) == [TerminateChild("decode-0"), TerminateChild("decode-1")]
    assert launcher.send(ChildExited("decode-1", -15)) == []
    assert launcher.send(ChildExited("decode-0", -15)) == [TerminateChild("proxy")]
    assert launcher.send(ChildExited("proxy", 0)) == [FinishLaunch("prefill-0 could not start: no such file")]
    assert launcher.core.phase is Phase.OVER


def test_why_children_could_not_start_is_told_once_and_without_their_commands_names():
    launcher = Launcher([PLANS[2], *PLANS[3:]])
    launcher.send(ChildExited("prefill-0", 2, "kvferry prefill: error: a.b: wrong"))
    launcher.send(ChildExited("decode-0", 2, "kvferry decode: error: a.b: wrong"))
    end = launcher.send(ChildExited("decode-1", 2, "kvferry decode: error: another"))
    assert end == [FinishLaunch("prefill-0 could not start: a.b: wrong", True)]
    assert launcher.told == ["decode-1: another"]


def test_why_a_child_ended_in_service_or_on_the_way_out_is_told():
    launcher = Launcher([PLANS[3], PLANS[4]])
    launcher.send(ReadySeen())
    launcher.send(ChildExited("decode-0", 1, "kvferry decode: error: lost"))
    assert launcher.told == ["decode-0 ended with code 1: lost; starting it again in 0.5 s"]
    launcher.send(StopRequested())
    launcher.send(ChildExited("decode-1", 1, "kvferry decode: error: stuck"))
    assert launcher.told[-1] == "decode-1: stuck"


def test_a_child_that_finds_the_configuration_wrong_says_so_by_its_code():
    launcher = Launcher([PLANS[1]])
    assert launcher.send(ChildExited("router", 2, "a.b: wrong")) == [
        FinishLaunch("router could not start: a.b: wrong", True)
    ]


def test_a_child_that_is_killed_while_starting_gets_some_more_chances():
    launcher = Launcher([PLANS[1]])
    for _ in range(4):
        assert launcher.send(ChildExited("router", -9)) == []
        assert launcher.tick(4.0) == [StartChild("router")]
    assert launcher.send(ChildExited("router", -9)) == [FinishLaunch("router could not start: was ended by signal 9")]


def test_what_a_cut_file_does_is_told_in_words():
    launcher = Launcher()
    launcher.send(ReadySeen())
    launcher.send(ChildExited("decode-0", -signal.SIGBUS))
    words = "was ended by SIGBUS: a file that it maps, a weights file perhaps, was cut while it was in use"
    assert words in launcher.told[-1]


@pytest.mark.rule(37)
def test_an_orderly_stop_goes_router_prefill_decode_proxy():
    launcher = Launcher()
    launcher.send(ReadySeen())
    assert launcher.send(StopRequested()) == [TerminateChild("router")]
    assert launcher.send(ChildExited("router", 0)) == [TerminateChild("prefill-0")]
    assert launcher.send(ChildExited("decode-1", -11)) == [], (
        "a crash of a later stage is neither mended nor waited for"
    )
    assert launcher.send(ChildExited("prefill-0", 0)) == [TerminateChild("decode-0")]
    assert launcher.send(ChildExited("decode-0", 0)) == [TerminateChild("proxy")]
    assert launcher.send(ChildExited("proxy", 0)) == [FinishLaunch("")]


def test_what_does_not_stop_in_time_is_killed_and_the_rest_goes_on():
    launcher = Launcher()
    launcher.send(StopRequested())
    assert launcher.core.next_wakeup() == 30
    assert launcher.tick(29) == []
    assert launcher.tick(1) == [KillChild("router")]
    assert launcher.core.next_wakeup() is None
    assert launcher.send(ChildExited("router", -9)) == [TerminateChild("prefill-0")]


def test_a_second_request_kills_all_and_a_third_changes_nothing():
    launcher = Launcher()
    launcher.send(StopRequested())
    assert launcher.send(StopRequested()) == [KillChild(plan.name) for plan in PLANS]
    assert launcher.send(StopRequested()) == []
    for plan in PLANS[:-1]:
        assert launcher.send(ChildExited(plan.name, -9)) == []
    assert launcher.send(ChildExited("decode-1", -9)) == [FinishLaunch("stopped at once, before all had drained")]


def test_a_stop_cancels_a_restart_that_is_due():
    launcher = Launcher()
    launcher.send(ReadySeen())
    launcher.send(ChildExited("router", -9))
    assert launcher.send(StopRequested()) == [TerminateChild("prefill-0")]
    assert TerminateChild("router") not in launcher.tick(10)


def test_ready_on_the_way_out_is_not_told():
    launcher = Launcher()
    launcher.send(StopRequested())
    assert launcher.send(ReadySeen()) == []


def test_an_end_that_comes_twice_is_a_bug():
    launcher = Launcher()
    launcher.send(ChildExited("router", -9))
    with pytest.raises(InvariantError):
        launcher.send(ChildExited("router", -9))


def test_two_children_of_one_name_are_a_bug():
    with pytest.raises(InvariantError):
        LauncherCore([PLANS[0], PLANS[0]], LIMITS)


@given(st.lists(st.integers(0, 9), max_size=60))
def test_whatever_happens_every_child_is_gone_at_the_end(choices: list[int]):
    """A random story, then a stop: Finish comes exactly once, when nothing runs, and nothing starts after the stop."""
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
