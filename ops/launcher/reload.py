"""gunicorn's reload (SIGHUP): old workers are told to leave when the new ones serve, not when they are forked.

gunicorn by itself tells them at once, and a new worker needs seconds until it serves: it imports, and it finds the
nodes. Runs in the arbiter, in its own thread; what it does is what the arbiter would have done a little earlier.
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
    """Make this arbiter wait for the workers that will stay before it ends those that are too many.

    While it waits, here and in its own reload (for old workers to end), it is not deaf to what ends it.
    """
    manage_workers, reap_workers = arbiter.manage_workers, arbiter.reap_workers

    def wait_and_manage() -> None:
        _wait_for_staying(arbiter)
        manage_workers()

    def hear_and_reap() -> None:
        if arbiter.LISTENERS and _is_told_to_stop(arbiter):  # it has none when it stops already
            raise StopIteration  # as its own handler has it: all workers, old and new, are told together
        reap_workers()

    arbiter.manage_workers, arbiter.reap_workers = wait_and_manage, hear_and_reap


def _wait_for_staying(arbiter: "Arbiter") -> None:
    """Until they serve, or there are not too many workers any more."""
    until = time.monotonic() + arbiter.timeout
    while _staying_boot(arbiter):
        if time.monotonic() > until:
            _LOG.warning("new workers do not serve after %s s; the old ones are ended all the same", arbiter.timeout)
            return
        arbiter.reap_workers()
        time.sleep(POLL_S)


def _staying_boot(arbiter: "Arbiter") -> bool:
    """Whether some are too many, and the youngest ones, which stay, do not all serve yet."""
    by_age: list[RouterWorker] = sorted(arbiter.WORKERS.values(), key=lambda worker: worker.age)
    excess = len(by_age) - arbiter.num_workers
    return excess > 0 and not all(worker.serves for worker in by_age[excess:])


def _is_told_to_stop(arbiter: "Arbiter") -> bool:
    """Look at the signals that wait to be handled, and leave them there."""
    waiting = []
    while True:
        try:
            waiting.append(arbiter.SIG_QUEUE.get_nowait())
        except queue.Empty:
            break
    for number in waiting:
        arbiter.SIG_QUEUE.put_nowait(number)
    return not _STOPS.isdisjoint(waiting)
