"""The thread that computes. It takes step plans and posts what came of them; it never touches a socket or a core.

Of a step that may take long it says about once a second that it goes on: who is slow is not to be taken for one who
hangs (ADR 0027). The others are not asked for their layers, so that a device may compute all of them in one call.
"""

import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from kvferry.common.base.clock import (
    Clock,
    MonotonicClock,
)
from kvferry.common.cluster.events import (
    EngineFailed,
    Event,
    LayersDone,
    StepDone,
    StepProgressed,
)
from kvferry.common.scheduling.step import StepBatch, StepResult
from kvferry.common.scheduling.tokens_in_flight import TokensInFlight

LONG_S = 1.0
"""Where the step before began less than this ago, the next one that computes no prompt is short as well."""
SAY_S = 1.0
"""Between two signs of one step."""


class StepRunner(Protocol):
    """What computes a step; `common.engine.runner.ModelRunner` is one."""

    def execute(self, plan: StepBatch, on_layers_done: Callable[[int], None] | None) -> StepResult:
        """Compute the plan, and say how many of its layers are done, if asked to. Called by one thread only."""
        ...


class EngineThread:
    """Runs plans in the order they were given."""

    def __init__(
        self,
        runner: StepRunner,
        activate: Callable[[], None],
        post: Callable[[Event], None],
        log: logging.Logger,
        name: str = "engine",
        clock: Clock | None = None,
    ) -> None:
        self._runner = runner
        self._activate = activate
        self._post = post
        self._log = log
        self._clock = clock or MonotonicClock()
        self._begun = -math.inf
        """When the last step began."""
        self._drawn = TokensInFlight()
        self._plans: queue.SimpleQueue[StepBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to wait for plans."""
        self._thread.start()

    def submit(self, plan: StepBatch) -> None:
        """Give it one more step."""
        self._plans.put(plan)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Finish the step in progress and end. False: it did not end in time (the thread is a daemon)."""
        self._plans.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        doing = "binding to the device"
        try:
            self._activate()
            while (plan := self._plans.get()) is not None:
                doing = f"step {plan.step_id}"
                filled = self._drawn.fill(plan)
                result = self._runner.execute(filled, self._reporter(plan))
                self._drawn.note(result)
                self._post(StepDone(result))
        except Exception as error:  # noqa: BLE001  whatever it was, the device is in no known state: the process ends
            self._log.critical("%s failed", doing, exc_info=error)
            self._post(EngineFailed(f"{doing}: {type(error).__name__}: {error}"))

    def _reporter(self, plan: StepBatch) -> Callable[[int], None] | None:
        before, self._begun = self._begun, self._clock.now()
        if plan.report_layers:
            return lambda layers: self._post(LayersDone(plan.step_id, layers))
        has_prompt = any(len(part.token_ids) > 1 for part in plan.scheduled)
        return self._signs() if has_prompt or self._begun - before >= LONG_S else None

    def _signs(self) -> Callable[[int], None]:
        said = self._begun

        def on_layer(_: int) -> None:
            nonlocal said
            now = self._clock.now()
            if now - said >= SAY_S:
                said = now
                self._post(StepProgressed())

        return on_layer
