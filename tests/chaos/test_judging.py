"""What the chaos trial calls wrong: a trial that cannot fail would prove nothing."""

from typing import Any

import pytest

from tests.chaos.client import End, Record, judge
from tests.chaos.client_requests import ClientRequest, Generation
from tests.chaos.deaths import unexplained_deaths
from tests.chaos.fault_injector import InjectedFault
from tests.chaos.fault_proxy import ProxyLinks
from tests.chaos.faults import Fault, Kind, faults
from tests.chaos.load import Client, Target
from tests.chaos.recovery import percentile, recoveries
from tests.chaos.sampler import Sample, grown
from tests.chaos.soak import growth
from tests.chaos.trial import Plan, Result, unexplained

GENERATION = Generation((1, 2), (), 4)
TRUTH = [7, 8, 9, 9]
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def record(end: End, ids: list[int], took: float = 1.0, **ask: object) -> Record:
    values: dict[str, Any] = {"leaves_after_s": None, "timeout_s": None, **ask}
    return Record(ClientRequest(0, 1, True, **values), 10.0, 10.0 + took, end, 200, 5000, ids)


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        (record(End.COMPLETE, TRUTH), ""),
        (record(End.LEFT, [7, 8], leaves_after_s=0.5), ""),
        (record(End.REFUSED, []), ""),
        (record(End.TIMEOUT, [7], timeout_s=1), ""),
        (record(End.COMPLETE, [7, 8, 9]), "3 of 4 tokens"),
        (record(End.COMPLETE, []), "0 of 4 tokens"),
        (record(End.COMPLETE, [7, 8, 8, 9]), "token 2 of 4 differs"),
        (record(End.LOST, [8]), "token 0 of 4 differs"),
        (record(End.COMPLETE, [*TRUTH, 9]), "token 4 of 4 differs"),
        (record(End.TIMEOUT, []), "a deadline that no client asked for"),
        (record(End.TIMEOUT, [], took=0.5, timeout_s=1), "its deadline came after 0.50 s"),
        (record(End.TIMEOUT, [], took=20.0, timeout_s=1), "ended 19.0 s after its deadline"),
        (record(End.COMPLETE, TRUTH, took=20.0, timeout_s=1), "ended 19.0 s after its deadline"),
        (record(End.HUNG, [], took=120.0), "no end in 120 s, 0 tokens"),
        (record(End.FAILED, []), "failed with 200"),
    ],
)
def test_judge(seen: Record, wrong: str) -> None:
    judge(seen, GENERATION, TRUTH)
    assert seen.wrong == wrong


def test_lost_connection_needs_a_killed_worker_that_had_it() -> None:
    lost = record(End.LOST, [7])
    result = Result(Plan(1, 1, 1, 1.0, 1, 1.0, 1.0), "", records=[lost])
    assert len(unexplained(result)) == 1
    kill = Fault(1, 0.0, Kind.KILL, "worker")
    for at, ports, explained in ((10.5, {4999}, False), (12.0, {5000}, False), (10.5, {5000}, True)):
        result.injected = [InjectedFault(kill, at, [1], ports)]
        assert (unexplained(result) == []) == explained


def test_same_seed_same_faults_and_every_kind_comes() -> None:
    def first(seed: int) -> list[Fault]:
        return [fault for fault, _ in zip(faults(seed, NODES, 2.0), range(300), strict=False)]

    drawn = first(3)
    assert drawn == first(3) != first(4)
    assert {fault.kind for fault in drawn} == set(Kind)
    assert {*NODES, "worker", "router", "proxy", "launcher"} <= {fault.target for fault in drawn}
    for fault in drawn:
        assert fault.target != fault.other
        assert (fault.lasts_s > 0) == (fault.kind in (Kind.STOP, Kind.CUT, Kind.CUT_ONE_WAY)), fault


def test_recovery_of_a_stream_and_of_the_service() -> None:
    stream = record(End.COMPLETE, TRUTH, took=9.0)
    stream.event_times = [10.5, 11.0, 14.0, 18.0]
    late = record(End.COMPLETE, TRUTH)
    late.started, late.ended = 12.0, 13.5
    found, nothing = recoveries([11.5, 30.0], [stream, late])
    assert (found.served_after_s, found.resumed_after_s, found.streams) == (2.0, 2.5, 1)
    assert (nothing.served_after_s, nothing.resumed_after_s, nothing.streams) == (None, None, 0)


def test_percentile() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([3.0], 0.5) == 3.0


def test_more_memory_or_descriptors_than_before_is_reported() -> None:
    before = [Sample(0.0, "worker", 1, 100, 10), Sample(0.0, "worker", 2, 120, 12)]
    assert grown(before, [Sample(9.0, "worker", 3, 130, 12)], 0.1, 0) == []
    assert len(grown(before, [Sample(9.0, "worker", 3, 133, 13)], 0.1, 0)) == 2
    assert grown(before, [Sample(9.0, "decode-7", 4, 1, 1)], 0.1, 0) == ["decode-7 was not there before"]


def test_soak_sees_a_slow_leak() -> None:
    mib = 1 << 20
    flat = [Sample(float(t), "worker", 1, 50 * mib, 10) for t in range(100)]
    leak = [Sample(float(t), "decode-0", 2, (200 + t) * mib, 10) for t in range(100)]
    descriptors = [Sample(float(t), "proxy", 3, 50 * mib, 10 + t // 50) for t in range(100)]
    samples = [sample for row in zip(flat, leak, descriptors, strict=True) for sample in row]
    grown_by = growth(samples, samples[:3], samples[-3:])
    assert {process.name: process.is_flat for process in grown_by} == {
        "worker": True,
        "decode-0": False,
        "proxy": False,
    }


@pytest.mark.asyncio
async def test_client_sees_a_connection_without_an_answer() -> None:
    with pytest.raises(ConnectionError):
        await Client(Target(1, "m", (GENERATION,))).ask(ClientRequest(0, 1, streamed=False))


def test_fault_proxy_places_every_node_behind_a_front() -> None:
    links = ProxyLinks(("router", "prefill-0", "decode-0"))
    try:
        places = links.places()
        assert set(places) == {"prefill-0", "decode-0"}
        assert any("prefill.kv_advertise" in word for word in places["prefill-0"].after)
    finally:
        links.close()


def test_a_process_that_ended_by_itself_is_wrong() -> None:
    done = """
        WARNING serve kvferry.launcher: decode-0 was killed by signal 9; restarting it in 0.2 s
        WARNING serve kvferry.launcher: decode-0 was killed by signal 15; restarting it in 0.2 s
        WARNING serve kvferry.launcher: decode-0 exited with code 0; restarting it in 0.2 s
        ERROR   router gunicorn.error: Worker (pid:17) was sent SIGKILL! Perhaps out of memory?
    """
    assert unexplained_deaths(done) == []
    for line in (
        "WARNING serve kvferry.launcher: decode-0 was killed by signal 6; restarting it in 0.2 s",
        "WARNING serve kvferry.launcher: prefill-1 exited with code 1; restarting it in 0.2 s",
        "ERROR   router gunicorn.error: Worker (pid:17) was sent SIGSEGV!",
        "ERROR   router gunicorn.error: Worker (pid:17) exited with code 3.",
    ):
        (found,) = unexplained_deaths(done + line)
        assert found.endswith(line)
