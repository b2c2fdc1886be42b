"""The thread that computes. It takes step plans and posts what came of them; it never touches a socket or a core."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from common.scheduling.drawn import Drawn
from common.scheduling.step import StepPlan, StepResult
from common.state.events import EngineFailed, Event, LayersDone, StepDone


class StepRunner(Protocol):
    """What computes a step; `common.engine.runner.ModelRunner` is one."""

    def execute(self, plan: StepPlan, on_layers_done: Callable[[int], None] | None) -> StepResult:
        """Compute the plan. Called by one thread only."""
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
    ) -> None:
        self._runner = runner
        self._activate = activate
        self._post = post
        self._log = log
        self._drawn = Drawn()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to wait for plans."""
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
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
                result = self._runner.execute(filled, self._reporter(plan) if plan.report_layers else None)
                self._drawn.note(result)
                self._post(StepDone(result))
        except Exception as error:  # noqa: BLE001  whatever it was, the device is in no known state: the process ends
            self._log.critical("%s failed", doing, exc_info=error)
            self._post(EngineFailed(f"{doing}: {type(error).__name__}: {error}"))

    def _reporter(self, plan: StepPlan) -> Callable[[int], None]:
        return lambda layers: self._post(LayersDone(plan.step_id, layers))
