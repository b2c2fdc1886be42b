"""Makes gunicorn's reload (SIGHUP) stop the old workers when the new ones serve, not when they are forked.

gunicorn by itself stops them immediately, but a new worker needs seconds until it serves: it imports modules and
discovers the nodes. Runs in the arbiter's own thread and only delays what the arbiter does anyway.
"""

import logging
import queue
import signal
import time
from typing import TYPE_CHECKING

from kvferry.ops.launcher.worker import RouterWorker

if TYPE_CHECKING:
    from gunicorn.arbiter import Arbiter

_LOG = logging.getLogger("gunicorn.error")
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}
POLL_S = 0.05


def new_workers_first(arbiter: "Arbiter") -> None:
    """Make this arbiter wait until the newest workers serve before it stops excess ones.

    While it waits, here and in its own reload (for old workers to exit), it still reacts to stop signals.
    """
    manage_workers, reap_workers = arbiter.manage_workers, arbiter.reap_workers

    def wait_and_manage() -> None:
        _wait_for_staying(arbiter)
        manage_workers()

    def check_stop_and_reap() -> None:
        if arbiter.LISTENERS and _stop_is_queued(arbiter):  # without listeners it is stopping already
            raise StopIteration  # as its own signal handler does: stops old and new workers together
        reap_workers()

    arbiter.manage_workers, arbiter.reap_workers = wait_and_manage, check_stop_and_reap


def _wait_for_staying(arbiter: "Arbiter") -> None:
    """Return when the newest workers serve, or no worker is in excess."""
    until = time.monotonic() + arbiter.timeout
    while _staying_boot(arbiter):
        if time.monotonic() > until:
            _LOG.warning("new workers do not serve after %s s; stopping the old ones anyway", arbiter.timeout)
            return
        arbiter.reap_workers()
        time.sleep(POLL_S)


def _staying_boot(arbiter: "Arbiter") -> bool:
    """Whether there are excess workers while some of the newest ones, which stay, do not serve yet."""
    by_age: list[RouterWorker] = sorted(arbiter.WORKERS.values(), key=lambda worker: worker.age)
    excess = len(by_age) - arbiter.num_workers
    return excess > 0 and not all(worker.serves for worker in by_age[excess:])


def _stop_is_queued(arbiter: "Arbiter") -> bool:
    """Whether a stop signal waits in the arbiter's queue; leaves the queue as it is."""
    waiting = []
    while True:
        try:
            waiting.append(arbiter.SIG_QUEUE.get_nowait())
        except queue.Empty:
            break
    for number in waiting:
        arbiter.SIG_QUEUE.put_nowait(number)
    return not _STOPS.isdisjoint(waiting)
