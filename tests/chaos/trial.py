"""A trial: a crowd asks while faults happen, then everything is compared with before. Decides what is wrong."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from tqdm import tqdm

from tests.chaos.client import End, Record
from tests.chaos.crowd import Crowd, Target, learn, now
from tests.chaos.deaths import strange_deaths
from tests.chaos.faults import Kind, faults
from tests.chaos.recovery import Recovery, recoveries
from tests.chaos.sampler import Sample, Sampler, grown, look
from tests.chaos.stand import IDLE_S, Stand, on_every_worker
from tests.chaos.strike import Strike, Striker
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
    strikes: list[Strike] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    before: list[Sample] = field(default_factory=list)
    after: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def ends(self) -> Counter[End]:
        return Counter(record.end for record in self.records)

    def recoveries(self) -> list[Recovery]:
        return recoveries([strike.at for strike in self.strikes], self.records)


async def run_trial(stand: Stand, plan: Plan, target: Target) -> Result:
    """Learn the truth, disturb, compare."""
    result = Result(plan, stand.links.kind)
    target.truths = await learn(target)
    await on_every_worker(stand, lambda: learn(target))
    await asyncio.to_thread(stand.wait_whole)
    result.before = look(stand.served)
    with Sampler(stand.served) as sampler:
        await _disturb(stand, plan, target, result)
        await asyncio.to_thread(_compare, stand, result)
        again = await learn(target)
        if again != target.truths:
            result.wrong.append("the same generations give other tokens afterwards")
        await asyncio.to_thread(_compare_processes, stand, result)
        result.samples = sampler.samples
    result.wrong += [f"{record.end.value}: {record.wrong}: {record}"[:600] for record in result.records if record.wrong]
    result.wrong += unexplained(result)
    result.wrong += strange_deaths(stand.served.log())
    return result


def unexplained(result: Result) -> list[str]:
    """Connections that broke off although no worker that had them was killed."""
    wrong = []
    for record in result.records:
        if record.end is End.LOST and not any(_took(strike, record) for strike in result.strikes):
            wrong.append(f"connection {record.port} lost, its worker was not killed: {record}"[:600])
    return wrong


def _took(strike: Strike, record: Record) -> bool:
    meanwhile = record.started - _GRACE_S <= strike.at <= record.ended + _GRACE_S
    return strike.fault.kind is Kind.KILL and record.port in strike.ports and meanwhile


async def _disturb(stand: Stand, plan: Plan, target: Target, result: Result) -> None:
    crowd = Crowd(target, plan.seed, plan.clients, plan.think_s)
    striker = Striker(stand.served, stand.links)
    result.began = now()
    crowding = asyncio.ensure_future(crowd.run())
    bar = tqdm(total=plan.faults, unit="fault", desc="chaos")
    try:
        for fault in faults(plan.seed, stand.shape.nodes, plan.gap_s):
            await asyncio.wait([crowding], timeout=fault.gap_s)
            if crowding.done() or now() > result.began + plan.most_s:
                break
            if len(striker.strikes) < plan.faults:
                bar.update(await striker.strike(fault))
                bar.set_postfix(requests=len(crowd.records), wrong=sum(bool(r.wrong) for r in crowd.records))
            elif len(crowd.records) >= plan.requests:
                break
    finally:
        bar.close()
        await striker.finish()
        crowd.stop()
    await crowding
    result.ended = now()
    result.records, result.strikes = crowd.records, striker.strikes


def _compare(stand: Stand, result: Result) -> None:
    try:
        stand.wait_whole()
        wait_until(lambda: _open_requests(stand) == 0, "no request is open", IDLE_S)
    except AssertionError as error:
        result.wrong.append(f"not whole afterwards: {error}")


def _compare_processes(stand: Stand, result: Result) -> None:
    def is_back() -> bool:
        result.after = look(stand.served)
        return not grown(result.before, result.after, RSS_SHARE, RSS_BYTES)

    try:
        stand.wait_whole()
        wait_until(is_back, "memory and descriptors are back", IDLE_S)
    except AssertionError as error:
        found = grown(result.before, result.after, RSS_SHARE, RSS_BYTES)
        result.wrong.append(f"{error}: {'; '.join(found)}")


def _open_requests(stand: Stand) -> float:
    metrics = stand.served.metrics()
    return metrics["num_requests_running"] + metrics["num_requests_waiting"]
