"""The engine thread: FIFO order, token ids filled in for tokens in flight, layer and progress events."""

import logging
from array import array
from collections.abc import Callable

import pytest

from kvferry.common.base.clock import ManualClock
from kvferry.common.cluster.events import Event, LayersDone, StepDone, StepProgressed
from kvferry.common.engine.engine_thread import PROGRESS_INTERVAL_S, SHORT_STEP_S, EngineThread
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult
from tests.support.eventually import PATIENCE_S


def part(token_id: int, position: int, *, ahead: bool = False) -> ScheduledSequence:
    return ScheduledSequence(7, array("I", [token_id]), position, (0, 1), True, position + 1, is_placeholder=ahead)


class CountingRunner:
    """Samples 101, 102 and so on for sequence 7; the second step fails."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def execute(self, batch: StepBatch, on_layers_done: Callable[[int], None] | None) -> StepResult:
        self.batches.append(batch)
        if on_layers_done is not None:
            on_layers_done(1)
        if batch.step_id == 2:
            return StepResult(2, failed={7: "not a number"})
        return StepResult(batch.step_id, {7: 100 + batch.step_id})


def run(*batches: StepBatch) -> tuple[list[StepBatch], list[Event]]:
    """The batches given to the runner, and the posted events."""
    runner, posted = CountingRunner(), list[Event]()
    engine = EngineThread(runner, lambda: None, posted.append, logging.getLogger("test"))
    for batch in batches:
        engine.submit(batch)
    engine.start()
    assert engine.stop(PATIENCE_S)
    return runner.batches, posted


def test_a_step_scheduled_ahead_computes_the_token_sampled_by_the_previous_step():
    batches, posted = run(StepBatch(1, (part(5, 3),)), StepBatch(3, (part(0, 4, ahead=True),)))
    assert batches == [StepBatch(1, (part(5, 3),)), StepBatch(3, (part(101, 4),))]
    assert posted == [StepDone(StepResult(1, {7: 101})), StepDone(StepResult(3, {7: 103}))]


def test_after_a_failed_sample_it_computes_an_arbitrary_id():
    batches, posted = run(StepBatch(2, (part(5, 3),)), StepBatch(3, (part(0, 4, ahead=True),)))
    assert batches[1] == StepBatch(3, (part(0, 4),))
    assert posted[0] == StepDone(StepResult(2, failed={7: "not a number"}))


def test_layers_are_posted_for_the_step_that_reports_them():
    _, posted = run(StepBatch(1, (part(5, 3),)), StepBatch(3, (part(0, 4, ahead=True),), report_layers=True))
    assert [event for event in posted if isinstance(event, LayersDone)] == [LayersDone(3, 1)]


class SlowRunner:
    """Four layers of `layer_s` each; records the steps that had a layer callback."""

    def __init__(self, clock: ManualClock, layer_s: float) -> None:
        self.clock, self.layer_s = clock, layer_s
        self.with_callback: list[int] = []

    def execute(self, batch: StepBatch, on_layers_done: Callable[[int], None] | None) -> StepResult:
        for layer in range(4):
            self.clock.advance(self.layer_s)
            if on_layers_done is not None:
                on_layers_done(layer + 1)
        if on_layers_done is not None:
            self.with_callback.append(batch.step_id)
        return StepResult(batch.step_id)


def run_slow(layer_s: float, *batches: StepBatch) -> tuple[list[int], list[Event]]:
    clock, posted = ManualClock(), list[Event]()
    runner = SlowRunner(clock, layer_s)
    engine = EngineThread(runner, lambda: None, posted.append, logging.getLogger("test"), clock=clock)
    for batch in batches:
        engine.submit(batch)
    engine.start()
    assert engine.stop(PATIENCE_S)
    return runner.with_callback, posted


DECODE = tuple(StepBatch(number, (part(5, number),)) for number in (1, 2, 3))
CHUNK = StepBatch(4, (ScheduledSequence(8, array("I", [1, 2]), 0, (2,), False),))


@pytest.mark.rule(10)
@pytest.mark.parametrize(("intervals", "events"), [(3.0, 4), (1 / 2, 2), (1 / 8, 0)])
def test_a_long_step_posts_its_progress_but_not_for_every_layer(intervals: float, events: int):
    """Each layer takes so many intervals. ADR 0027."""
    _, posted = run_slow(intervals * PROGRESS_INTERVAL_S, DECODE[0])
    assert posted == [*[StepProgressed()] * events, StepDone(StepResult(1))]


def test_steps_after_a_short_one_have_no_layer_callback_unless_they_have_a_prompt():
    assert run_slow(SHORT_STEP_S / 16, *DECODE, CHUNK)[0] == [1, 4]
    assert run_slow(SHORT_STEP_S / 2, *DECODE, CHUNK)[0] == [1, 2, 3, 4]
