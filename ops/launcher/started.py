"""A cluster that is started for a while by another command: `kvferry serve` in a process of its own."""

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO

from kvferry.common.base.errors import (
    ConfigError,
    KvferryError,
)
from kvferry.common.base.parent_death_signal import with_death_signal
from kvferry.common.base.python_command import python_command
from kvferry.ops.cli.errors import WRONG_USE

_STOP_S = 60.0


@contextlib.contextmanager
def started_cluster(*words: str) -> Iterator[tuple[str, str]]:
    """`kvferry serve` with these words; yields url and model name. KvferryError when it does not come up or stop,
    ConfigError when the words are to blame. Whatever else goes wrong meanwhile is told in place of how it ended."""
    # Its nodes are silent when the machine is busy, hardly ever for another reason: a request waits for them.
    settings = ("--set", "log.level=warning", "--set", "timers.new_request_wait_s=60")
    serve = python_command("kvferry.ops.cli.main", "serve", "--port", "0", *settings)
    # Whatever becomes of this process, the cluster does not stay behind.
    command = with_death_signal(signal.SIGTERM, (*serve, *words))
    with (
        tempfile.TemporaryFile("w+") as log,
        # A session of its own: a Ctrl-C reaches this process alone, which then stops the cluster.
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
        kind = ConfigError if server.wait() == WRONG_USE else KvferryError
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
    return lines[-1] if lines else "it said nothing"
