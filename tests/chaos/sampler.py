"""Memory and descriptors of every process of a cluster over time, looked at from outside."""

import contextlib
import threading
from dataclasses import dataclass

import psutil

from tests.chaos.load import now
from tests.support.serve import Served


@dataclass(frozen=True)
class Sample:
    """One process at one time."""

    at: float
    name: str
    """The launcher's name for it, `worker` or `launcher`."""
    pid: int
    rss: int
    descriptors: int


class Sampler:
    """Looks at the beginning, every few seconds and at the end, in a thread; use it as a context manager."""

    def __init__(self, served: Served, every_s: float = 2.0) -> None:
        self.samples: list[Sample] = []
        self._served = served
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(30.0)

    def _run(self) -> None:
        self.samples += look(self._served)
        while not self._stop.wait(self._every_s):
            self.samples += look(self._served)
        self.samples += look(self._served)


def look(served: Served) -> list[Sample]:
    """Every process now."""
    samples = []
    for name, process in named(served):
        with contextlib.suppress(psutil.Error):
            samples.append(Sample(now(), name, process.pid, process.memory_info().rss, process.num_fds()))
    return samples


def named(served: Served) -> list[tuple[str, psutil.Process]]:
    """Every process of the cluster with its name."""
    found: list[tuple[str, psutil.Process]] = []
    with contextlib.suppress(psutil.Error):
        found = [("launcher", psutil.Process(served.process.pid)), *served.children().items()]
        found += [("worker", worker) for worker in served.workers()]
    return found


def grown(before: list[Sample], after: list[Sample], rss_share: float, rss_bytes: int) -> list[str]:
    """What processes have more of than the first look's processes of that name had, in words."""
    found = []
    for sample in after:
        same = [old for old in before if old.name == sample.name]
        if not same:
            found.append(f"{sample.name} was not there before")
            continue
        descriptors, rss = max(old.descriptors for old in same), max(old.rss for old in same)
        if sample.descriptors > descriptors:
            found.append(f"{sample.name} ({sample.pid}): {sample.descriptors} descriptors, {descriptors} before")
        if sample.rss > rss * (1 + rss_share) + rss_bytes:
            found.append(f"{sample.name} ({sample.pid}): {sample.rss >> 20} MiB, {rss >> 20} before")
    return found
