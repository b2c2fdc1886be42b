"""Runs a node's shell on a thread, while the main thread waits for its end and handles signals."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.common.base.errors import KvferryError
from kvferry.common.cluster.actions import ExitProcess
from kvferry.common.node.shell import NodeShell

_BIND_TIMEOUT_S = 60.0
_JOIN_TIMEOUT_S = 60.0
_SIGNAL_POLL_S = 0.2
"""Python runs signal handlers only between waits of the main thread."""


class ControlThread:
    """The thread of one shell; keeps its result or its exception."""

    def __init__(self, shell: NodeShell) -> None:
        self._shell = shell
        self._exit: ExitProcess | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_bound(self) -> None:
        """Wait until the shell has bound its endpoints. Raises what the shell raised."""
        if not self._shell.wait_bound(_BIND_TIMEOUT_S) or not self._shell.endpoint:
            self.wait()
            raise KvferryError("the node ended before it had bound its endpoints")

    def wait(self) -> ExitProcess:
        """Wait for the end of the thread. Raises what the shell raised."""
        while self._thread.is_alive():
            self._thread.join(_SIGNAL_POLL_S)
        if self._error is not None:
            raise self._error
        assert self._exit is not None
        return self._exit

    def end(self) -> None:
        """Stop the shell if it still runs: its sockets must be closed before their context."""
        if self._thread.is_alive():
            self._shell.stop("the process ends")
            self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._exit = self._shell.run()
        except BaseException as error:  # noqa: BLE001  raised again by `wait`, on the main thread
            self._error = error


@contextmanager
def drain_on_signals(shell: NodeShell, log: logging.Logger) -> Iterator[None]:
    """Within the block, the first SIGTERM or SIGINT drains the shell and a second one stops it."""
    received: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            shell.drain()
        else:
            shell.stop("stopped by a second signal")

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        if received:
            log.info("received %s", signal.Signals(received[0]).name)
