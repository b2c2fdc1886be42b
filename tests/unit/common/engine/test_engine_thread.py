"""The engine thread: plans in their order, with true ids in place of those that were drawn meanwhile."""

import logging
from array import array
from collections.abc import Callable

import pytest

from kvferry.common.base.clock import ManualClock
from kvferry.common.cluster.events import (
    Event,
    LayersDone,
    StepDone,
    StepGoesOn,
)
from kvferry.common.engine.engine_thread import (
    LONG_S,
    SAY_S,
    EngineThread,
)
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult
from tests.support.eventually import PATIENCE_S


def part(token_id: int, position: int, *, ahead: bool = False) -> ScheduledSequence:
    return ScheduledSequence(7, array("I", [token_id]), position, (0, 1), True, position + 1, is_placeholder=ahead)


class CountingRunner:
    """Draws 101, 102 and so on for sequence 7; the second step fails."""

    def __init__(self) -> None:
        self.plans: list[StepBatch] = []

    def execute(self, plan: StepBatch, on_layers_done: Callable[[int], None] | None) -> StepResult:
        self.plans.append(plan)
        if on_layers_done is not None:
            on_layers_done(1)
        if plan.step_id == 2:
            return StepResult(2, failed={7: "not a number"})
        return StepResult(plan.step_id, {7: 100 + plan.step_id})


def run(*plans: StepBatch) -> tuple[list[StepBatch], list[Event]]:
    """What the runner was given, and what was posted."""
    runner, posted = CountingRunner(), list[Event]()
    engine = EngineThread(runner, lambda: None, posted.append, logging.getLogger("test"))
    for plan in plans:
        engine.submit(plan)
    engine.start()
    assert engine.stop(PATIENCE_S)
    return runner.plans, posted


def test_a_step_planned_ahead_computes_what_the_step_before_drew():
    plans, posted = run(StepBatch(1, (part(5, 3),)), StepBatch(3, (part(0, 4, ahead=True),)))
    assert plans == [StepBatch(1, (part(5, 3),)), StepBatch(3, (part(101, 4),))]
    assert posted == [StepDone(StepResult(1, {7: 101})), StepDone(StepResult(3, {7: 103}))]


def test_behind_a_failure_it_computes_some_id():
    plans, posted = run(StepBatch(2, (part(5, 3),)), StepBatch(3, (part(0, 4, ahead=True),)))
    assert plans[1] == StepBatch(3, (part(0, 4),))
    assert posted[0] == StepDone(StepResult(2, failed={7: "not a number"}))


def test_layers_are_told_of_the_step_that_reports_them():
    _, posted = run(StepBatch(1, (part(5, 3),)), StepBatch(3, (part(0, 4, ahead=True),), report_layers=True))
    assert [event for event in posted if isinstance(event, LayersDone)] == [LayersDone(3, 1)]


class SlowRunner:
    """Four layers that take so long each; notes which steps were asked for them."""

    def __init__(self, clock: ManualClock, layer_s: float) -> None:
        self.clock, self.layer_s = clock, layer_s
        self.asked: list[int] = []

    def execute(self, plan: StepBatch, on_layers_done: Callable[[int], None] | None) -> StepResult:
        for layer in range(4):
            self.clock.advance(self.layer_s)
            if on_layers_done is not None:
                on_layers_done(layer + 1)
        if on_layers_done is not None:
            self.asked.append(plan.step_id)
        return StepResult(plan.step_id)


def go(layer_s: float, *plans: StepBatch) -> tuple[list[int], list[Event]]:
    clock, posted = ManualClock(), list[Event]()
    runner = SlowRunner(clock, layer_s)
    engine = EngineThread(runner, lambda: None, posted.append, logging.getLogger("test"), clock=clock)
    for plan in plans:
        engine.submit(plan)
    engine.start()
    assert engine.stop(PATIENCE_S)
    return runner.asked, posted


DECODE = tuple(StepBatch(number, (part(5, number),)) for number in (1, 2, 3))
CHUNK = StepBatch(4, (ScheduledSequence(8, array("I", [1, 2]), 0, (2,), False),))


@pytest.mark.parametrize(("layer_s", "signs"), [(SAY_S * 3, 4), (SAY_S / 2, 2), (SAY_S / 8, 0)])
def test_a_long_step_says_that_it_goes_on_but_not_with_each_layer(layer_s: float, signs: int):
    """ADR 0027."""
    _, posted = go(layer_s, DECODE[0])
    assert posted == [*[StepGoesOn()] * signs, StepDone(StepResult(1))]


def test_steps_after_a_short_one_are_computed_in_one_call_unless_they_have_a_prompt():
    assert go(LONG_S / 16, *DECODE, CHUNK)[0] == [1, 4]
    assert go(LONG_S / 2, *DECODE, CHUNK)[0] == [1, 2, 3, 4]
