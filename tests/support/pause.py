"""Named points at which a test can pause a node's engine and resume it, instead of sleeping."""

import threading
from collections.abc import Callable

from kvferry.common.engine.engine_thread import StepRunner
from kvferry.common.scheduling.step import StepBatch, StepResult
from tests.support.eventually import PATIENCE_S

PAUSE_TIMEOUT_S = 4 * PATIENCE_S
"""Several times a test's patience: it may wait for several conditions while the engine is paused."""


class PausePoints:
    """Wraps a step runner. Points: `before_step`, `after_layer` (first layer of transferred KV), `after_step`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: dict[str, threading.Event] = {}
        self._reached: dict[str, threading.Event] = {}
        self.fail_with: Exception | None = None
        """Raised by the next step."""

    def arm(self, point: str) -> None:
        """Pause the engine when it next reaches the point."""
        with self._lock:
            self._armed[point] = threading.Event()
            self._reached[point] = threading.Event()

    def is_reached(self, point: str) -> bool:
        """Whether the engine is paused at an armed point."""
        return self._reached[point].is_set()

    def release(self, point: str) -> None:
        """Resume the engine and disarm the point."""
        with self._lock:
            armed = self._armed.pop(point, None)
        if armed is not None:
            armed.set()

    def release_all(self) -> None:
        """Resume the engine and disarm all points."""
        for point in list(self._armed):
            self.release(point)

    def pass_by(self, point: str) -> None:
        """Called on the engine thread."""
        with self._lock:
            armed = self._armed.get(point)
        if armed is not None:
            self._reached[point].set()
            assert armed.wait(PAUSE_TIMEOUT_S), f"the test did not resume the engine at {point}"

    def wrap(self, runner: StepRunner) -> StepRunner:
        """A runner that pauses at the points."""
        return _PausableRunner(runner, self)


class _PausableRunner:
    def __init__(self, runner: StepRunner, points: PausePoints) -> None:
        self._runner = runner
        self._points = points

    def execute(self, plan: StepBatch, on_layers_done: Callable[[int], None] | None) -> StepResult:
        self._points.pass_by("before_step")
        if self._points.fail_with is not None:
            error, self._points.fail_with = self._points.fail_with, None
            raise error

        def on_layers(layers: int) -> None:
            assert on_layers_done is not None
            on_layers_done(layers)
            if plan.report_layers:
                self._points.pass_by("after_layer")

        result = self._runner.execute(plan, on_layers if on_layers_done is not None else None)
        self._points.pass_by("after_step")
        return result
