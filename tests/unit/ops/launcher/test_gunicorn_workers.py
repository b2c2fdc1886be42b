"""Real gunicorn workers that stop: not before new ones serve, and without resetting connected clients."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from kvferry.ops.launcher.cluster import CONFIG_ENV
from tests.support.gated_app import DIRECTORY
from tests.support.processes import num_listening, peers
from tests.support.serve import wait_until

STOP_S = 60.0
CONFIG = "timers.worker_drain_s = 120\n"
"""After this time gunicorn kills a worker: never in these tests."""


class Gunicorn:
    """gunicorn with the product's configuration and the gated application."""

    def __init__(self, directory: Path, workers: int) -> None:
        self.directory = directory
        self.gate = directory / "gate"
        config = directory / "cluster.toml"
        config.write_text(CONFIG)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            self.port: int = listener.getsockname()[1]
            command = (
                "-m",
                "gunicorn",
                "-c",
                "python:kvferry.ops.launcher.gunicorn_conf",
                "--bind",
                f"fd://{listener.fileno()}",
            )
            self.process = subprocess.Popen(
                (sys.executable, *command, "--workers", str(workers), "tests.support.gated_app:app"),
                env={**os.environ, CONFIG_ENV: str(config), DIRECTORY: str(directory)},
                pass_fds=(listener.fileno(),),
            )

    def noted(self, what: str) -> set[int]:
        """Process ids of the workers that recorded `what`: `starting`, or `stopping`."""
        return {int(file.name.rpartition("-")[2]) for file in self.directory.glob(f"{what}-*")}

    def workers(self) -> set[int]:
        """Process ids of the running workers."""
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def ask(self) -> int:
        """Process id of the worker that answers a new connection."""
        return int(httpx.get(f"http://127.0.0.1:{self.port}/", trust_env=False, timeout=STOP_S).text)


@contextmanager
def running(directory: Path, workers: int) -> Iterator[Gunicorn]:
    """A serving gunicorn. At the end it is terminated, if the test has not done so, and must exit with code 0."""
    gunicorn = Gunicorn(directory, workers)
    try:
        gunicorn.gate.touch()
        gunicorn.ask()
        wait_until(lambda: len(gunicorn.noted("starting")) == workers, "all workers start")
        yield gunicorn
        gunicorn.process.terminate()
        assert gunicorn.process.wait(STOP_S) == 0
    finally:
        gunicorn.process.kill()
        gunicorn.process.wait()


def reload_with_gate_shut(gunicorn: Gunicorn) -> set[int]:
    """Start as many new workers, which cannot serve yet; returns the old workers."""
    old = gunicorn.noted("starting")
    gunicorn.gate.unlink()
    gunicorn.process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(gunicorn.noted("starting") - old) == len(old), "new workers start")
    return old


@pytest.mark.rule(37)
def test_a_reload_stops_old_workers_when_the_new_ones_serve(tmp_path: Path) -> None:
    with running(tmp_path, 2) as gunicorn:
        old = reload_with_gate_shut(gunicorn)
        assert gunicorn.noted("stopping") == set()
        assert gunicorn.ask() in old
        gunicorn.gate.touch()
        wait_until(lambda: not old & gunicorn.workers(), "old workers end")
        assert gunicorn.noted("stopping") == old
        assert gunicorn.ask() in gunicorn.noted("starting") - old


def test_a_stop_during_a_reload_does_not_wait_for_new_workers(tmp_path: Path) -> None:
    with running(tmp_path, 1) as gunicorn:
        old = reload_with_gate_shut(gunicorn)
        gunicorn.process.terminate()
        wait_until(lambda: gunicorn.noted("stopping") > old, "all workers stop")
        gunicorn.gate.touch()


def test_a_new_worker_that_dies_does_not_end_an_old_one(tmp_path: Path) -> None:
    """The arbiter also handles the stop signal that follows."""
    with running(tmp_path, 1) as gunicorn:
        old = reload_with_gate_shut(gunicorn)
        (new,) = gunicorn.noted("starting") - old
        os.kill(new, signal.SIGKILL)
        wait_until(lambda: gunicorn.workers() == old, "the new worker is gone")
        assert gunicorn.ask() in old
        assert gunicorn.noted("stopping") == set()
        gunicorn.gate.touch()


@pytest.mark.rule(37)
def test_a_connected_client_is_answered_by_a_stopping_worker(tmp_path: Path) -> None:
    """The request comes after the worker has received the signal and stopped accepting."""
    with running(tmp_path, 1) as gunicorn, socket.create_connection(("127.0.0.1", gunicorn.port), STOP_S) as client:
        (worker,) = psutil.Process(gunicorn.process.pid).children()
        wait_until(lambda: client.getsockname() in peers(worker), "the connection is accepted")
        listening = num_listening(worker)
        worker.terminate()
        wait_until(lambda: num_listening(worker) < listening, "it stops accepting")
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close\r\n" in answer
        assert answer.endswith(b"\r\n\r\n%d" % worker.pid)
