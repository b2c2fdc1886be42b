"""The supervisor with small real children: order of stops, restarts, failures."""

import asyncio
import os
import signal

import pytest

from kvferry.common.base.clock import MonotonicClock
from kvferry.common.base.errors import ConfigError, KvferryError
from kvferry.ops.launcher.core import ChildPlan, Stage
from kvferry.ops.launcher.process import ChildSpec
from kvferry.ops.launcher.restart_policy import RestartLimits
from kvferry.ops.launcher.supervisor import STOP_SIGNALS, Supervisor
from tests.support.children import SERVES, STUBBORN, alive, child, run

LIMITS = RestartLimits(min_s=0.01, max_s=0.1, healthy_after_s=60.0)


class Watched:
    """A supervisor under test; collects the lines, and can wait for one."""

    def __init__(self, *specs: ChildSpec):
        self.lines: list[tuple[str, str]] = []
        self.changed = asyncio.Event()
        self.ready = asyncio.Event()
        self.announced = 0
        self.supervisor = Supervisor(
            specs,
            LIMITS,
            MonotonicClock(),
            wait_ready=self._wait_ready,
            on_ready=self._announce,
            on_stop=lambda: None,
            write_line=self._line,
        )

    async def _wait_ready(self) -> None:
        await self.ready.wait()

    def _announce(self) -> None:
        self.announced += 1
        self.changed.set()

    def _line(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self.changed.set()

    async def until(self, condition) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def until_up(self, *names: str, times: int = 1) -> None:
        await self.until(lambda: all(self.lines.count((name, "up")) >= times for name in names))


@pytest.fixture
def _signals_restored():
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals_restored")
def test_children_run_until_a_signal_stops_them_in_stage_order():
    async def story():
        watched = Watched(
            child("p", SERVES, Stage.PROXY), child("r", SERVES, Stage.ROUTER), child("d", SERVES, Stage.DECODE)
        )
        run = asyncio.create_task(watched.supervisor.run())
        await watched.until_up("p", "r", "d")
        watched.ready.set()
        await watched.until(lambda: watched.announced)
        pids = watched.supervisor.pids()
        os.kill(os.getpid(), signal.SIGINT)
        await run
        assert [name for name, line in watched.lines if line == "bye"] == ["r", "d", "p"]
        assert watched.announced == 1
        assert not any(alive(pid) for pid in pids.values())

    run(story)


@pytest.mark.usefixtures("_signals_restored")
def test_a_killed_child_is_restarted():
    async def story():
        watched = Watched(child("d", SERVES))
        run = asyncio.create_task(watched.supervisor.run())
        await watched.until_up("d")
        os.kill(watched.supervisor.pids()["d"], signal.SIGKILL)
        await watched.until_up("d", times=2)
        os.kill(os.getpid(), signal.SIGTERM)
        await run

    run(story)


@pytest.mark.usefixtures("_signals_restored")
def test_a_second_signal_kills_all_children():
    async def story():
        watched = Watched(child("d", STUBBORN), child("e", STUBBORN, Stage.ROUTER))
        run = asyncio.create_task(watched.supervisor.run())
        await watched.until_up("d", "e")
        pids = watched.supervisor.pids()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KvferryError, match="stopped before all children had drained"):
            await run
        assert not any(alive(pid) for pid in pids.values())

    run(story)


@pytest.mark.usefixtures("_signals_restored")
def test_a_child_that_does_not_stop_in_time_is_killed():
    async def story():
        watched = Watched(child("d", STUBBORN, bound_s=0.05))
        run = asyncio.create_task(watched.supervisor.run())
        await watched.until_up("d")
        os.kill(os.getpid(), signal.SIGINT)
        await run

    run(story)


@pytest.mark.usefixtures("_signals_restored")
def test_a_child_that_cannot_start_ends_the_cluster_with_its_last_line():
    async def story():
        watched = Watched(child("r", SERVES, Stage.ROUTER), child("d", "print('no model'); raise SystemExit(1)"))
        with pytest.raises(KvferryError, match="d could not start: no model"):
            await watched.supervisor.run()

    run(story)


@pytest.mark.usefixtures("_signals_restored")
def test_an_error_line_at_the_end_is_not_printed_twice():
    """An error line that is not the last one is relayed like any other."""
    said = (
        "print('kvferry decode: error: early'); print('on'); print('kvferry decode: error: last'); raise SystemExit(2)"
    )

    async def story():
        watched = Watched(child("d", said))
        with pytest.raises(ConfigError, match=r"^d could not start: last$"):
            await watched.supervisor.run()
        assert watched.lines == [("d", "kvferry decode: error: early"), ("d", "on")]

    run(story)


@pytest.mark.usefixtures("_signals_restored")
def test_exit_code_2_of_a_child_is_a_config_error():
    async def story():
        watched = Watched(child("d", "print('a.b: wrong'); raise SystemExit(2)"))
        with pytest.raises(ConfigError, match=r"d could not start: a\.b: wrong"):
            await watched.supervisor.run()

    run(story)


@pytest.mark.usefixtures("_signals_restored")
def test_a_missing_command_ends_the_cluster():
    async def story():
        watched = Watched(ChildSpec(ChildPlan("d", Stage.DECODE, 1.0), ("/no/such/command",)))
        with pytest.raises(KvferryError, match="d could not start"):
            await watched.supervisor.run()

    run(story)
