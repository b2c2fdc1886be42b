"""The engine thread: takes step batches and posts their results. Never touches a socket or a core.

A step that may take long posts StepProgressed about once a second, so that a slow engine is not taken for a hung one
(ADR 0027). Short steps get no layer callback, so that a device may compute all layers in one call.
"""

import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from kvferry.common.base.clock import Clock, MonotonicClock
from kvferry.common.cluster.events import EngineFailed, LayersDone, StepDone, StepProgressed
from kvferry.common.scheduling.step import StepBatch, StepResult
from kvferry.common.scheduling.tokens_in_flight import TokensInFlight

EngineEvent = LayersDone | StepProgressed | StepDone | EngineFailed
"""Everything that the engine thread posts."""

SHORT_STEP_S = 1.0
"""If the previous step began less than this ago, the next one without a prompt is expected to be short as well."""
PROGRESS_INTERVAL_S = 1.0
"""Least time between two StepProgressed events of one step."""


class StepRunner(Protocol):
    """Computes one step; `common.engine.runner.ModelRunner` implements it."""

    def execute(self, batch: StepBatch, on_layers_done: Callable[[int], None] | None) -> StepResult:
        """Compute the batch, and report how many layers are done if a callback is given. Called by one thread only."""
        ...


class EngineThread:
    """Runs step batches in FIFO order."""

    def __init__(
        self,
        runner: StepRunner,
        activate: Callable[[], None],
        post: Callable[[EngineEvent], None],
        log: logging.Logger,
        name: str = "engine",
        clock: Clock | None = None,
    ) -> None:
        """`activate` binds the thread to its device; `post` is called on the engine thread."""
        self._runner = runner
        self._activate = activate
        self._post = post
        self._log = log
        self._clock = clock or MonotonicClock()
        self._last_start = -math.inf
        self._tokens_in_flight = TokensInFlight()
        self._batches: queue.SimpleQueue[StepBatch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, batch: StepBatch) -> None:
        """Queue a step; returns immediately."""
        self._batches.put(batch)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Finish the queued steps and end. Returns False when the (daemon) thread did not end within the timeout."""
        self._batches.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        stage = "binding to the device"
        try:
            self._activate()
            while (batch := self._batches.get()) is not None:
                stage = f"step {batch.step_id}"
                filled = self._tokens_in_flight.fill(batch)
                result = self._runner.execute(filled, self._layer_callback(batch))
                self._tokens_in_flight.note(result)
                self._post(StepDone(result))
        except Exception as error:  # noqa: BLE001  after any error the device's state is unknown: the process must end
            self._log.critical("%s failed", stage, exc_info=error)
            self._post(EngineFailed(f"{stage}: {type(error).__name__}: {error}"))

    def _layer_callback(self, batch: StepBatch) -> Callable[[int], None] | None:
        previous_start, self._last_start = self._last_start, self._clock.now()
        if batch.report_layers:
            return lambda layers: self._post(LayersDone(batch.step_id, layers))
        has_prompt = any(len(part.token_ids) > 1 for part in batch.scheduled)
        return self._progress_callback() if has_prompt or self._last_start - previous_start >= SHORT_STEP_S else None

    def _progress_callback(self) -> Callable[[int], None]:
        last_post = self._last_start

        def on_layer(_: int) -> None:
            nonlocal last_post
            now = self._clock.now()
            if now - last_post >= PROGRESS_INTERVAL_S:
                last_post = now
                self._post(StepProgressed())

        return on_layer
