"""Supervisor, run directory, HTTP socket and readiness, with small real children."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest

from kvferry.common.base.clock import MonotonicClock
from kvferry.common.base.errors import ConfigError, KvferryError
from kvferry.common.config.host import HostFacts
from kvferry.common.config.load import load_config
from kvferry.ops.launcher.cluster import serve_config
from kvferry.ops.launcher.core import ChildPlan, Stage
from kvferry.ops.launcher.listen import listen
from kvferry.ops.launcher.process import ChildSpec, prefixed, start_child
from kvferry.ops.launcher.readiness import status_of, wait_until_answered
from kvferry.ops.launcher.restart_policy import RestartLimits
from kvferry.ops.launcher.run_dir import has_room_for_sockets, remove_left_over, run_base, run_directory
from kvferry.ops.launcher.supervisor import STOP_SIGNALS, Supervisor
from tests.support.eventually import PATIENCE_S
from tests.support.processes import has_ended
from tests.support.serve import wait_until

LIMITS = RestartLimits(min_s=0.01, max_s=0.1, healthy_after_s=60.0)
SERVES = "import signal, sys; print('up', flush=True); signal.sigwait({15}); print('bye', flush=True)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def child(name: str, code: str, stage: Stage = Stage.DECODE, bound_s: float = PATIENCE_S, **more) -> ChildSpec:
    if "sigwait" in code:
        code = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); " + code
    return ChildSpec(ChildPlan(name, stage, bound_s), (sys.executable, "-c", textwrap.dedent(code)), **more)


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


def run(story) -> None:
    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not has_ended(psutil.Process(pid))
    return False


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


def test_the_exit_of_a_child_is_seen_while_its_own_child_holds_the_pipe():
    code = """
        import os, subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid, flush=True)
        os.kill(os.getpid(), 9)
    """

    async def story():
        started = await start_child(child("d", code), lambda name, line: None)
        exit_code, grandchild = await started.wait()
        assert exit_code == -9
        while alive(int(grandchild)):
            await asyncio.sleep(0)

    run(story)


def test_long_unfinished_and_invalid_lines_are_relayed():
    code = r"import sys; sys.stdout.buffer.write(b'x' * 300000 + b'\n\n\xff\nlast')"

    async def story():
        lines: list[str] = []
        started = await start_child(child("d", code), lambda name, line: lines.append(line))
        assert await started.wait() == (0, "last")
        assert lines == ["x" * 300000, "", "\ufffd", "last"]

    run(story)


def test_children_die_with_a_launcher_that_is_killed(tmp_path: Path):
    launcher = f"""
        import asyncio, os, sys
        from kvferry.ops.launcher.core import ChildPlan, Stage
        from kvferry.ops.launcher.process import ChildSpec, start_child

        async def main():
            spec = ChildSpec(ChildPlan("d", Stage.DECODE, 1.0), (sys.executable, "-c", {SERVES.replace("15", "10")!r}))
            child = await start_child(spec, lambda name, line: print(child_pid[0], line, flush=True))
            child_pid.append(child.pid)
            await child.wait()

        child_pid = []
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[0])
        assert alive(pid)
        process.kill()
        process.wait(PATIENCE_S)
    wait_until(lambda: not alive(pid), "the child ends")


def test_directories_are_emptied_at_every_start(tmp_path: Path):
    directory = tmp_path / "metrics"

    async def story():
        for _ in range(2):
            spec = child("r", f"open({str(directory / 'a')!r}, 'x')", fresh_dirs=(directory,))
            started = await start_child(spec, lambda name, line: None)
            assert await started.wait() == (0, "")

    run(story)
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("text", "d-0 | text"),
        ("", "d-0 | "),
        ('{"process":"d-0"}', '{"process":"d-0"}'),
        ("2026-01-01T00:00:00.000Z INFO    d-0 log: a", "2026-01-01T00:00:00.000Z INFO    d-0 log: a"),
    ],
)
def test_lines_have_the_childs_name_once(line: str, shown: str):
    assert prefixed("d-0", line) == shown


def test_a_run_directory_is_private_and_removed(tmp_path: Path):
    with run_directory(tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "socket").touch()
        assert remove_left_over(tmp_path) == [], "its lock is held"
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_killed_run_is_removed_by_the_next(tmp_path: Path):
    code = f"""
        import os
        from pathlib import Path
        from kvferry.ops.launcher.run_dir import run_directory
        with run_directory(Path({str(tmp_path)!r})) as path:
            (path / "left").touch()
            os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=PATIENCE_S)
    assert len(list(tmp_path.glob("kvferry-*/left"))) == 1
    with run_directory(tmp_path) as path:
        assert list(tmp_path.iterdir()) == [path]


def test_the_run_directory_is_in_xdg_runtime_dir(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_base() == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert run_base() != tmp_path / "none"


def test_the_path_of_a_run_directory_leaves_space_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Binds a socket to prove it: with one character more, the next directory is used."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    length = next(number for number in range(200, 0, -1) if has_room_for_sockets(Path("/" + "a" * (number - 1))))
    longest = tmp_path / ("a" * (length - len(str(tmp_path)) - 1))
    for place, wanted in ((longest, longest), (longest.with_name(longest.name + "a"), tmp_path)):
        place.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
        with run_directory() as path:
            assert path.parent == wanted
            host = HostFacts(cores=1, free_memory_bytes=8 << 30)
            discovery = serve_config(load_config(), path, model_path="/m", name="m", port=1, host=host).discovery
            for endpoint in (discovery.proxy_nodes, discovery.proxy_workers):
                assert endpoint.startswith(f"ipc://{path}/")
                with socket.socket(socket.AF_UNIX) as bound:
                    bound.bind(endpoint.removeprefix("ipc://"))


def test_no_directory_for_sockets_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(os, "access", lambda place, mode: place != "/tmp")
    with pytest.raises(KvferryError, match=r"set XDG_RUNTIME_DIR or TMPDIR to a writable directory .* at most"):
        run_base()


def test_port_zero_picks_a_free_port_and_a_port_in_use_is_an_error():
    listener = listen("127.0.0.1", 0, 5)
    try:
        assert listener.url == f"http://127.0.0.1:{listener.port}"
        with pytest.raises(KvferryError, match=f"port {listener.port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", listener.port, 5)
    finally:
        listener.close()
    listen("127.0.0.1", listener.port, 5).close()


def test_an_invalid_address_is_an_error():
    with pytest.raises(KvferryError, match="is not an address"):
        listen("no such host", 0, 5)


def test_a_client_that_reads_nothing_is_disconnected():
    """Otherwise its answer would stay in memory for as long as it is connected."""
    listener = listen("127.0.0.1", 0, 1, unread_s=0.2)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", listener.port))
        server, _ = listener.socket.accept()
        with server:
            server.settimeout(60.0)
            with pytest.raises(OSError, match="timed out") as caught:
                server.sendall(bytes(50_000_000))
            assert caught.value.errno == errno.ETIMEDOUT  # from the kernel; the error of settimeout has no errno
    listener.close()


def test_a_wildcard_address_is_reached_through_loopback():
    listener = listen("0.0.0.0", 0, 5)
    try:
        assert listener.url == f"http://127.0.0.1:{listener.port}"
    finally:
        listener.close()


class HttpStub:
    """Answers every request with the next of `statuses`; repeats the last one."""

    def __init__(self, *statuses: int):
        self.statuses = list(statuses)
        self.paths: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.paths.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()


def test_ready_requires_good_answers_in_two_rounds():
    async def story():
        stub = HttpStub(503, *[200] * 9, *[200] * 3, 503, 200)
        async with await asyncio.start_server(stub.handle, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await wait_until_answered(url, "/v2/health/ready", workers=2)
        assert stub.statuses == [200]
        assert len(stub.paths) == 1 + 9 + 9 + 2 * 9
        assert set(stub.paths) == {"/v2/health/ready"}

    run(story)


def test_no_server_is_status_0():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert asyncio.run(status_of(f"http://127.0.0.1:{port}", "/")) == 0


def test_a_child_does_not_block_on_a_launcher_that_does_not_read():
    async def story():
        talks = """
            import logging
            from kvferry.common.config.schema import LogConfig
            from kvferry.common.base.log import setup_logging
            setup_logging(LogConfig(), "d")
            for number in range(20_000):
                logging.getLogger("a").info("%0100d", number)
        """
        ended_fd, child_fd = os.pipe()
        ended = asyncio.Event()
        spec = child("d", textwrap.dedent(talks).strip(), pass_fds=(child_fd,))
        process = await start_child(spec, lambda _name, _line: None)
        os.close(child_fd)
        asyncio.get_running_loop().add_reader(ended_fd, ended.set)
        await ended.wait()  # nothing is read before `wait`
        asyncio.get_running_loop().remove_reader(ended_fd)
        os.close(ended_fd)
        assert (await process.wait())[0] == 0

    run(story)
