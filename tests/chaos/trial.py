"""A trial: a load asks while faults happen, then everything is compared with before. Decides what is wrong."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from tqdm import tqdm

from tests.chaos.client import End, Record
from tests.chaos.deaths import unexplained_deaths
from tests.chaos.fault_injector import FaultInjector, InjectedFault
from tests.chaos.faults import Kind, faults
from tests.chaos.load import ClientLoad, Target, learn, now
from tests.chaos.recovery import Recovery, recoveries
from tests.chaos.sampler import Sample, Sampler, grown, look
from tests.chaos.testbed import IDLE_S, Testbed, on_every_worker
from tests.support.serve import wait_until

RSS_SHARE, RSS_BYTES = 0.25, 48 << 20
_GRACE_S = 0.5
"""A client may hear of a closed connection a moment before or after the fault is written down."""


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    seed: int
    requests: int
    faults: int
    gap_s: float
    clients: int
    think_s: float
    most_s: float
    """Then it ends, whatever is left to do."""


@dataclass
class Result:
    """What happened. `wrong` must be empty."""

    plan: Plan
    links: str
    began: float = 0.0
    ended: float = 0.0
    records: list[Record] = field(default_factory=list)
    injected: list[InjectedFault] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    before: list[Sample] = field(default_factory=list)
    after: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ends(self) -> Counter[End]:
        return Counter(record.end for record in self.records)

    def recoveries(self) -> list[Recovery]:
        return recoveries([fault_done.at for fault_done in self.injected], self.records)


async def run_trial(testbed: Testbed, plan: Plan, target: Target) -> Result:
    """Learn the truth, disturb, compare."""
    result = Result(plan, testbed.links.kind)
    target.expected_ids = await learn(target)
    await on_every_worker(testbed, lambda: learn(target))
    await asyncio.to_thread(testbed.wait_whole)
    result.before = look(testbed.served)
    with Sampler(testbed.served) as sampler:
        await _disturb(testbed, plan, target, result)
        await asyncio.to_thread(_compare, testbed, result)
        again = await learn(target)
        if again != target.expected_ids:
            result.wrong.append("the same generations give other tokens afterwards")
        await asyncio.to_thread(_compare_processes, testbed, result)
        result.samples = sampler.samples
    result.wrong += [f"{record.end.value}: {record.wrong}: {record}"[:600] for record in result.records if record.wrong]
    result.wrong += unexplained(result)
    result.wrong += unexplained_deaths(testbed.served.log())
    return result


def unexplained(result: Result) -> list[str]:
    """Connections that broke off although no worker that had them was killed."""
    wrong = []
    for record in result.records:
        if record.end is End.LOST and not any(_took(fault_done, record) for fault_done in result.injected):
            wrong.append(f"connection {record.port} lost, its worker was not killed: {record}"[:600])
    return wrong


def _took(fault_done: InjectedFault, record: Record) -> bool:
    meanwhile = record.started - _GRACE_S <= fault_done.at <= record.ended + _GRACE_S
    return fault_done.fault.kind is Kind.KILL and record.port in fault_done.ports and meanwhile


async def _disturb(testbed: Testbed, plan: Plan, target: Target, result: Result) -> None:
    load = ClientLoad(target, plan.seed, plan.clients, plan.think_s)
    injector = FaultInjector(testbed.served, testbed.links)
    result.began = now()
    loading = asyncio.ensure_future(load.run())
    bar = tqdm(total=plan.faults, unit="fault", desc="chaos")
    try:
        for fault in faults(plan.seed, testbed.shape.nodes, plan.gap_s):
            await asyncio.wait([loading], timeout=fault.gap_s)
            if loading.done() or now() > result.began + plan.most_s:
                break
            if len(injector.injected) < plan.faults:
                bar.update(await injector.inject(fault))
                bar.set_postfix(requests=len(load.records), wrong=sum(bool(r.wrong) for r in load.records))
            elif len(load.records) >= plan.requests:
                break
    finally:
        bar.close()
        await injector.finish()
        load.stop()
    await loading
    result.ended = now()
    result.records, result.injected = load.records, injector.injected


def _compare(testbed: Testbed, result: Result) -> None:
    try:
        testbed.wait_whole()
        wait_until(lambda: _open_requests(testbed) == 0, "no request is open", IDLE_S)
    except AssertionError as error:
        result.wrong.append(f"not whole afterwards: {error}")


def _compare_processes(testbed: Testbed, result: Result) -> None:
    def is_back() -> bool:
        result.after = look(testbed.served)
        return not grown(result.before, result.after, RSS_SHARE, RSS_BYTES)

    try:
        testbed.wait_whole()
        wait_until(is_back, "memory and descriptors are back", IDLE_S)
    except AssertionError as error:
        found = grown(result.before, result.after, RSS_SHARE, RSS_BYTES)
        result.wrong.append(f"{error}: {'; '.join(found)}")


def _open_requests(testbed: Testbed) -> float:
    metrics = testbed.served.metrics()
    return metrics["num_requests_running"] + metrics["num_requests_waiting"]
