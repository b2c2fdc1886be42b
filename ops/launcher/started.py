"""Starts `kvferry serve` in its own process for another command (demo, benchmark), and stops it."""

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO

from kvferry.common.base.errors import ConfigError, KvferryError
from kvferry.common.base.parent_death_signal import with_death_signal
from kvferry.common.base.python_command import python_command
from kvferry.ops.cli.errors import USAGE_ERROR

_STOP_S = 60.0


@contextlib.contextmanager
def started_cluster(*words: str) -> Iterator[tuple[str, str]]:
    """Run `kvferry serve` with these arguments; yields its URL and the model's name.

    Raises ConfigError if the arguments are wrong, KvferryError if the cluster does not start or stop. An exception from
    the body takes precedence over a failed stop.
    """
    # Requests wait for nodes that are silent: on one machine the usual reason is that it is busy.
    settings = ("--set", "log.level=warning", "--set", "timers.new_request_wait_s=60")
    serve = python_command("kvferry.ops.cli.main", "serve", "--port", "0", *settings)
    # The cluster stops when this process dies.
    command = with_death_signal(signal.SIGTERM, (*serve, *words))
    with (
        tempfile.TemporaryFile("w+") as log,
        # In its own session: a Ctrl-C reaches only this process, which then stops the cluster.
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True) as server,
    ):
        try:
            yield _ready(server, log)
        except BaseException:
            with contextlib.suppress(KvferryError):
                _stop(server, log)
            raise
        _stop(server, log)


def _ready(server: "subprocess.Popen[str]", log: IO[str]) -> tuple[str, str]:
    assert server.stdout is not None
    words = server.stdout.readline().split()
    if len(words) != 3 or words[0] != "ready":
        kind = ConfigError if server.wait() == USAGE_ERROR else KvferryError
        raise kind(f"the cluster did not start: {_last_line(log)}")
    return words[1], words[2].removeprefix("model=")


def _stop(server: "subprocess.Popen[str]", log: IO[str]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        code = server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        raise KvferryError(f"the cluster did not stop: {_last_line(log)}") from None
    if code:
        raise KvferryError(f"the cluster ended with code {code}: {_last_line(log)}")


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = log.read().splitlines()
    return lines[-1] if lines else "it wrote no error"
