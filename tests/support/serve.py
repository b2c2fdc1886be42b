"""A cluster of real processes: starts and stops `kvferry serve` as a user does, and finds its processes.

All files of a cluster are in one directory of its own, which must be empty at the end.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from kvferry.common.base.parent_death_signal import with_death_signal
from tests.support.eventually import PATIENCE_S
from tests.support.processes import suspended

START_S = 120.0
"""Deadline of `ready`: importing torch twice on a busy machine is slow."""
STOP_S = 90.0
POLL_S = 0.02
_SHM = Path("/dev/shm")
_NODE = re.compile(r'(?:prefill|decode|colocated)\.name="([^"]+)"')


@dataclass(frozen=True)
class ServeOptions:
    """How to start the cluster."""

    model: Path
    prefill: int = 1
    decode: int = 1
    workers: int = 2
    settings: Mapping[str, object] = field(default_factory=dict)
    """Keys and values of `--set`; they override those of `arguments`."""
    program: tuple[str, ...] = ("kvferry.ops.cli.main",)
    """The module to run, and arguments in front of `arguments`."""
    colocated: int = 0
    interpreter: tuple[str, ...] = (sys.executable, "-m")
    """Command that runs `program`; empty if that is an executable file."""
    cwd: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of this process."""

    def arguments(self) -> list[str]:
        """Arguments of `kvferry`."""
        settings: dict[str, object] = {
            "node.max_model_len": 2560,
            "node.kv_cache_bytes": 32 << 20,
            "node.threads": 1,
            **self.settings,
        }
        words = ["serve", "--model", str(self.model), "--port", "0", "--dtype", "float32"]
        words += ["--prefill", str(self.prefill), "--decode", str(self.decode), "--colocated", str(self.colocated)]
        words += ["--workers", str(self.workers)]
        for key, value in settings.items():
            words += ["--set", f"{key}={value}"]
        return words


class Served:
    """A running cluster, made by `serving`. `stop` checks that it leaves nothing behind."""

    def __init__(self, options: ServeOptions) -> None:
        self.options = options
        # A short path, since the length of ipc endpoints is bounded.
        self.base = Path(tempfile.mkdtemp(prefix="kvf-e2e-"))
        self._log_file = (self.base / "log").open("wb")
        (self.base / "run").mkdir(mode=0o700)
        (self.base / "tmp").mkdir(mode=0o700)
        self._shm_before = _shm_entries()
        environment = {
            **os.environ,
            **options.environment,
            "XDG_RUNTIME_DIR": str(self.base / "run"),
            "TMPDIR": str(self.base / "tmp"),
        }
        self.process = subprocess.Popen(
            # The cluster stops when this process dies.
            with_death_signal(signal.SIGTERM, (*options.interpreter, *options.program, *options.arguments())),
            cwd=options.cwd,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            env=environment,
            start_new_session=True,
        )
        self.url = ""
        self.model = ""

    # -- addresses and processes

    @property
    def port(self) -> int:
        """Port of the HTTP server."""
        return int(self.url.rpartition(":")[2])

    @property
    def infer_url(self) -> str:
        """The token endpoint."""
        return f"{self.url}/v2/models/{self.model}/infer"

    @property
    def run_dir(self) -> Path:
        """The cluster's run directory."""
        (path,) = (self.base / "run").iterdir()
        return path

    def members_endpoint(self) -> str:
        """Endpoint at which router workers discover the nodes."""
        config = tomllib.loads((self.run_dir / "cluster.toml").read_text())
        endpoint: str = config["discovery"]["proxy_workers"]
        return endpoint

    def log(self) -> str:
        """Stderr of the cluster so far."""
        return (self.base / "log").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All processes of this cluster, orphans too: its directory is in their environment."""
        return [process for process in psutil.process_iter() if _environment(process).get("TMPDIR") == self._mark]

    def children(self) -> dict[str, psutil.Process]:
        """The launcher's children by name: proxy, router, prefill-0, decode-0, and so on."""
        named = {}
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                named[_name(process.cmdline())] = process
        named.pop("", None)
        return named

    def workers(self) -> list[psutil.Process]:
        """The router's gunicorn workers."""
        router = self.children().get("router")
        return router.children() if router is not None else []

    def node(self, name: str) -> psutil.Process:
        return self.children()[name]

    @contextlib.contextmanager
    def only_worker(self, worker: psutil.Process) -> Iterator[None]:
        """Suspend the other workers inside the context, so that this one accepts every new connection.

        The kernel chooses which worker accepts; on an idle machine it mostly chooses the same one.
        """
        with suspended(*(other for other in self.workers() if other.pid != worker.pid)):
            yield

    # -- start and stop

    def wait_ready(self) -> None:
        """Read the `ready` line. Raises AssertionError with the log if it does not come."""
        words = self._first_line(START_S).split()
        assert len(words) == 3, f"no ready line but {words}; the log:\n{self.log()}"
        assert words[0] == "ready", words
        self.url, self.model = words[1], words[2].removeprefix("model=")

    def stop(self, number: int = signal.SIGINT, *, code: int = 0) -> None:
        """Stop it, and check its exit code and that it leaves nothing behind."""
        self.process.send_signal(number)
        self.ended(code)

    def ended(self, code: int = 0) -> None:
        """Wait for its exit with this code; it must leave no process, run directory, temporary file, shared memory."""
        assert self.process.wait(STOP_S) == code, self.log()
        left = [(process.pid, process.cmdline()) for process in self.processes()]
        assert left == [], left
        assert sorted((self.base / "run").iterdir()) == []
        assert sorted((self.base / "tmp").iterdir()) == []
        wait_until(lambda: _shm_entries() <= self._shm_before, "shared memory is released")
        if self.url:
            assert_port_is_free(self.port)

    def close(self) -> None:
        """Kill all its processes and remove its files, also after a failure."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log_file.close()
        shutil.rmtree(self.base)

    # -- requests

    def client(self, **options: object) -> httpx.Client:
        """A keep-alive client of the cluster."""
        return httpx.Client(base_url=self.url, timeout=120.0, trust_env=False)

    def is_ready(self) -> bool:
        """Whether the router reports that it can serve a request."""
        try:
            return httpx.get(f"{self.url}/v2/health/ready", trust_env=False, timeout=10.0).status_code == 200
        except httpx.TransportError:
            return False

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics whose only label is the model."""
        return parse_metrics(httpx.get(f"{self.url}/metrics", trust_env=False, timeout=30.0).text)

    # -- private

    @property
    def _mark(self) -> str:
        return str(self.base / "tmp")

    def _first_line(self, deadline_s: float) -> str:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        return self.process.stdout.readline().decode() if readable else ""


@contextlib.contextmanager
def serving(options: ServeOptions) -> Iterator[Served]:
    """A ready cluster. Stopped by SIGINT and checked at the end, unless the test has ended it."""
    served = Served(options)
    try:
        served.wait_ready()
        yield served
        if served.process.poll() is None:
            served.stop()
    finally:
        served.close()


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = PATIENCE_S) -> None:
    """Return when the condition holds. Raises AssertionError with `what` after the deadline."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"did not happen within {deadline_s} s: {what}"
        time.sleep(POLL_S)


def parse_metrics(text: str) -> dict[str, float]:
    """Name -> value of the samples whose only label is model_name."""
    found = re.findall(r'^(\w+)\{model_name="[^"]*"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def assert_port_is_free(port: int) -> None:
    """Assert that a server could listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def _name(command: list[str]) -> str:
    if "kvferry.ops.launcher.proxy_main" in command:
        return "proxy"
    if "kvferry.ops.launcher.gunicorn_main" in command:
        return "router"
    found = _NODE.search(" ".join(command))
    return found[1] if found else ""


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _shm_entries() -> set[str]:
    """Entries of /dev/shm without semaphores: a cluster has none, those of other processes come and go."""
    return {name for name in os.listdir(_SHM) if not name.startswith("sem.")} if _SHM.is_dir() else set()
