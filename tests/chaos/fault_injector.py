"""Does the faults to a running cluster, and undoes those that last. What happened, and when, is written down."""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.faults import Fault, Kind
from tests.chaos.links import Links
from tests.chaos.load import now
from tests.support.serve import Served


@dataclass
class InjectedFault:
    """A fault that happened. `ports` are the clients' ends of the connections that a killed worker had."""

    fault: Fault
    at: float
    pids: list[int]
    ports: set[int] = field(default_factory=set)


class FaultInjector:
    """One fault after another; those that last continue meanwhile."""

    def __init__(self, served: Served, links: Links) -> None:
        self.injected: list[InjectedFault] = []
        self._served = served
        self._links = links
        self._busy: set[tuple[str, str]] = set()
        self._stopped: set[int] = set()
        self._lasting: set[asyncio.Task[None]] = set()

    async def inject(self, fault: Fault) -> bool:
        """Do it, unless its victim is not there or is injected already."""
        injected = self._cut(fault) if fault.kind in (Kind.CUT, Kind.CUT_ONE_WAY) else await self._process(fault)
        if injected is not None:
            self.injected.append(injected)
        return injected is not None

    async def finish(self) -> None:
        """Wait until every stopped process continues and every link is whole."""
        await asyncio.gather(*self._lasting)

    def _cut(self, fault: Fault) -> InjectedFault | None:
        link = (fault.target, fault.other)
        if link in self._busy:
            return None
        self._busy.add(link)
        self._links.cut(*link, one_way=fault.kind is Kind.CUT_ONE_WAY)
        self._later(self._heal(link, fault.lasts_s))
        return InjectedFault(fault, now(), [])

    async def _heal(self, link: tuple[str, str], after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
        finally:
            self._links.heal(*link)
            self._busy.discard(link)

    async def _process(self, fault: Fault) -> InjectedFault | None:
        # Looking at all processes takes a while; clients continue meanwhile.
        victims = await asyncio.to_thread(self._victims, fault)
        if not victims:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._signal(fault, victims)
        return None

    def _victims(self, fault: Fault) -> list[psutil.Process]:
        """The process, and those that die with it; none when there is too little left of its kind."""
        children = self._served.children()
        if fault.target == "worker":
            workers = [worker for worker in self._served.workers() if worker.pid not in self._stopped]
            if len(workers) < 2:
                return []
            return [workers[fault.number % len(workers)]]
        if fault.target == "launcher":
            children["launcher"] = psutil.Process(self._served.process.pid)
        victim = children.get(fault.target)
        if victim is None or victim.pid in self._stopped:
            return []
        return [victim, *(victim.children() if fault.target == "router" else [])]

    def _signal(self, fault: Fault, victims: list[psutil.Process]) -> InjectedFault:
        fault_done = InjectedFault(fault, now(), [victim.pid for victim in victims])
        if fault.kind is Kind.STOP:
            for victim in victims:
                victim.suspend()
                self._stopped.add(victim.pid)
            self._later(self._resume(victims, fault.lasts_s))
        elif fault.kind is Kind.TERM:
            victims[0].terminate()
        else:
            # Stopped first: it takes no connection between the list of them and its end.
            for victim in victims:
                victim.suspend()
            fault_done.ports = client_ports(victims) if fault.target in ("worker", "router") else set()
            victims[0].kill()
        return fault_done

    async def _resume(self, victims: list[psutil.Process], after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
        finally:
            for victim in victims:
                self._stopped.discard(victim.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.resume()

    def _later(self, undo: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(undo)
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)


def client_ports(processes: list[psutil.Process]) -> set[int]:
    """The far ends of the connections that these processes accepted; they are in this process's namespace."""
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(path.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {int(row[2].rpartition(":")[2], 16) for row in rows if row[9] in inodes}
