"""Named points at which a node's engine can be stopped and let go, so that a test needs no guessed waits."""

import threading
from collections.abc import Callable

from kvferry.common.engine.engine_thread import StepRunner
from kvferry.common.scheduling.step import StepBatch, StepResult
from tests.support.eventually import PATIENCE_S

HELD_TOO_LONG_S = 4 * PATIENCE_S
"""A test may wait for several things meanwhile."""


class PausePoints:
    """Wraps a step runner. Points: `before_step`, `after_layer` (the first one of what is ferried), `after_step`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: dict[str, threading.Event] = {}
        self._reached: dict[str, threading.Event] = {}
        self.fail_with: Exception | None = None
        """Raised by the next step."""

    def arm(self, point: str) -> None:
        """Stop the engine when it comes to the point next."""
        with self._lock:
            self._armed[point] = threading.Event()
            self._reached[point] = threading.Event()

    def is_reached(self, point: str) -> bool:
        """Whether the engine stands at an armed point."""
        return self._reached[point].is_set()

    def release(self, point: str) -> None:
        """Let it go on; the point is not armed any more."""
        with self._lock:
            armed = self._armed.pop(point, None)
        if armed is not None:
            armed.set()

    def release_all(self) -> None:
        """Let go of everything."""
        for point in list(self._armed):
            self.release(point)

    def pass_by(self, point: str) -> None:
        """Called on the engine thread."""
        with self._lock:
            armed = self._armed.get(point)
        if armed is not None:
            self._reached[point].set()
            assert armed.wait(HELD_TOO_LONG_S), f"nobody let the engine go on from {point}"

    def wrap(self, runner: StepRunner) -> StepRunner:
        """The runner with the points in it."""
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
