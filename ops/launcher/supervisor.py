"""Runs `LauncherCore`: feeds it signals and exits, and starts, stops and kills the children. One asyncio loop."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence

from kvferry.common.base.clock import Clock
from kvferry.common.base.errors import ConfigError, InvariantError, KvferryError
from kvferry.common.base.run_with_timeout import run_with_timeout
from kvferry.ops.launcher.core import (
    Action,
    AnnounceReady,
    ChildExited,
    Event,
    FinishLaunch,
    KillChild,
    LauncherCore,
    LogLine,
    ReadySeen,
    StartChild,
    StopRequested,
    TerminateChild,
    Tick,
)
from kvferry.ops.launcher.process import Child, ChildSpec, WriteLine, start_child
from kvferry.ops.launcher.restart_policy import RestartLimits

_LOG = logging.getLogger("kvferry.launcher")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Keeps the children running until a stop signal, then stops them in the order of their stages."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        limits: RestartLimits,
        clock: Clock,
        *,
        wait_ready: Callable[[], Awaitable[None]],
        on_ready: Callable[[], object],
        on_stop: Callable[[], None],
        write_line: WriteLine,
    ) -> None:
        self._specs = {spec.plan.name: spec for spec in specs}
        self._core = LauncherCore([spec.plan for spec in specs], limits)
        self._clock = clock
        self._wait_ready = wait_ready
        self._on_ready = on_ready
        self._on_stop = on_stop
        self._write_line = write_line
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._children: dict[str, Child] = {}
        self._finish: FinishLaunch | None = None

    async def run(self) -> None:
        """Run until all children have stopped. Raises KvferryError with the reason if no stop was requested.

        On return the stop signals are ignored, so that the caller can clean up; the caller must restore them.
        """
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if (
                number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
            ):  # started by nohup: keep ignoring it
                loop.add_signal_handler(number, self._events.put_nowait, StopRequested())
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._run(tasks)
        finally:
            for child in self._children.values():
                child.kill()
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
        if self._finish is not None and self._finish.error:
            kind = ConfigError if self._finish.is_usage_error else KvferryError
            raise kind(self._finish.error)

    def pids(self) -> dict[str, int]:
        """Name -> process id of the running children."""
        return {name: child.pid for name, child in self._children.items()}

    async def _run(self, tasks: asyncio.TaskGroup) -> None:
        await self._perform(self._core.begin(self._clock.now()), tasks)
        ready = tasks.create_task(self._watch_ready())
        while self._finish is None:
            event = await self._next_event()
            await self._perform(self._core.handle(event, self._clock.now()), tasks)
            self._core.check_invariants()
        ready.cancel()

    async def _next_event(self) -> Event:
        wakeup = self._core.next_wakeup()
        timeout_s = None if wakeup is None else max(0.0, wakeup - self._clock.now())
        try:
            return await run_with_timeout(timeout_s, self._events.get())
        except TimeoutError:
            return Tick()

    async def _perform(self, actions: list[Action], tasks: asyncio.TaskGroup) -> None:
        for action in actions:
            match action:
                case StartChild(name):
                    await self._start(name, tasks)
                case TerminateChild(name):
                    self._on_stop()
                    self._signal(name, Child.terminate)
                case KillChild(name):
                    self._signal(name, Child.kill)
                case AnnounceReady():
                    self._on_ready()
                case LogLine(text, warning):
                    _LOG.log(logging.WARNING if warning else logging.INFO, text)
                case FinishLaunch():
                    self._finish = action

    async def _start(self, name: str, tasks: asyncio.TaskGroup) -> None:
        try:
            child = await start_child(self._specs[name], self._write_line)
        except OSError as error:
            self._events.put_nowait(ChildExited(name, 1, f"{error.strerror}"))
            return
        self._children[name] = child
        tasks.create_task(self._watch_child(name, child))

    def _signal(self, name: str, send: Callable[[Child], None]) -> None:
        child = self._children.get(name)
        if child is not None:  # else its exit is already in the queue
            send(child)

    async def _watch_child(self, name: str, child: Child) -> None:
        code, last_line = await child.wait()
        if self._children.pop(name, None) is not child:
            raise InvariantError(f"two processes of {name} ran at the same time")
        self._events.put_nowait(ChildExited(name, code, last_line))

    async def _watch_ready(self) -> None:
        await self._wait_ready()
        self._events.put_nowait(ReadySeen())
