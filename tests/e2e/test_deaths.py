"""Processes that are killed or frozen in the middle of work: requests continue or end truly, and the cluster serves
again.

One cluster for all; each test leaves it as whole as it found it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from kvferry.common.cluster.links import LinkState
from tests.e2e.conftest import Serve
from tests.support.bodies import body_of
from tests.support.cluster import tokens_of
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.node_watch import NodeWatch
from tests.support.processes import has_ended, suspended
from tests.support.raw_stream import RawRequest
from tests.support.serve import Served, wait_until
from tests.support.tiny_llama import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NODES = ("prefill-0", "decode-0")
LONG = 800
"""Tokens of a stream that is still running when something happens to it."""
PROMPT = random_prompt(21, 60, VOCAB_SIZE)


@pytest.fixture(scope="module")
def cluster(serve: Serve) -> Iterator[Served]:
    settings = {"router.max_iter_times": 2400, "serve.restart_min_s": 0.1}
    with serve(settings=settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def watch(cluster: Served) -> Iterator[NodeWatch]:
    with NodeWatch(cluster.members_endpoint()) as watch:
        yield watch


@pytest.fixture(scope="module")
def undisturbed(cluster: Served) -> list[int]:
    """What PROMPT gives when nothing happens."""
    with RawRequest(cluster, PROMPT, streamed=True, max_new_tokens=LONG) as request:
        assert request.status() == 200
        return tokens_of(request.events())


@pytest.fixture(autouse=True)
def whole(cluster: Served, watch: NodeWatch) -> Iterator[None]:
    """Before and after: ready, the same children, nothing held."""
    yield
    wait_until(lambda: {*cluster.children()} == {"proxy", "router", *NODES}, "every child runs", 120.0)
    wait_until(lambda: len(cluster.workers()) == 2, "both workers run")
    wait_until(cluster.is_ready, "it is ready again", 120.0)
    watch.wait_idle(*NODES)


def worker_of(cluster: Served, port: int) -> psutil.Process:
    """The worker at the other end of a connection."""
    for worker in cluster.workers():
        for connection in worker.net_connections():
            if connection.raddr and connection.raddr.port == port:
                return worker
    raise AssertionError(f"no worker has a connection with port {port}")


@pytest.mark.rule(32)
@pytest.mark.parametrize("name", NODES)
def test_node_is_killed_under_a_stream(cluster: Served, undisturbed: list[int], name: str) -> None:
    """A lost decode node's requests continue where it comes back; a prefill node is not needed any more."""
    victim = cluster.node(name)
    with RawRequest(cluster, PROMPT, streamed=True, max_new_tokens=LONG) as request:
        assert request.status() == 200
        events = request.events(20)
        victim.kill()
        events += request.events()
    assert tokens_of(events) == undisturbed
    assert events[-1]["finish_reason"] == "length"
    assert events[-1]["nodes"] == {"prefill": "prefill-0", "decode": "decode-0"}
    wait_until(lambda: name in cluster.children(), f"{name} is started again")
    assert cluster.node(name).pid != victim.pid


def test_prefill_is_killed_before_it_computes(cluster: Served, watch: NodeWatch, undisturbed: list[int]) -> None:
    victim = cluster.node("prefill-0")
    victim.suspend()
    with RawRequest(cluster, PROMPT, streamed=False, max_new_tokens=LONG) as request:
        wait_until(lambda: cluster.metrics()["num_requests_waiting"] == 1, "the request is taken")
        victim.kill()
        assert request.status() == 200
        assert request.body()["outputs"][0]["data"] == undisturbed


def test_decode_is_killed_under_load(cluster: Served) -> None:
    prompts = [random_prompt(n, 5 + 3 * n, VOCAB_SIZE) for n in range(24)]

    def ask(number: int) -> list[int]:
        with RawRequest(cluster, prompts[number], streamed=number % 2 == 1, max_new_tokens=150) as request:
            assert request.status() == 200
            if number % 2:
                return tokens_of(request.events())
            data: list[int] = request.body()["outputs"][0]["data"]
            return data

    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = list(pool.map(ask, range(len(prompts))))
        answers = [pool.submit(ask, number) for number in range(len(prompts))]
        wait_until(lambda: cluster.metrics()["num_requests_running"] > 10, "they are decoded")
        cluster.node("decode-0").kill()
        assert [answer.result() for answer in answers] == expected


def test_only_node_is_missed_and_new_requests_wait_for_it(cluster: Served, undisturbed: list[int]) -> None:
    """Health says immediately that it is away; what does not exist is not waited for."""
    cluster.node("decode-0").kill()
    with cluster.client() as http:
        wait_until(lambda: http.get("/v2/health/ready").status_code == 503, "it is missed")
        assert http.get("/v2/models/unknown/ready").status_code == 404
        assert http.post("/v2/models/unknown/infer", content=body_of(PROMPT, max_new_tokens=2)).status_code == 404
        answer = http.post("/v2/models/m/infer", content=body_of(PROMPT, max_new_tokens=2))
        assert answer.status_code == 200
        assert answer.json()["outputs"][0]["data"] == undisturbed[:2]


def test_worker_is_killed(cluster: Served, watch: NodeWatch) -> None:
    """Its clients lose their connections, no other client notices, and the nodes release its requests."""
    with RawRequest(cluster, PROMPT, streamed=True, max_new_tokens=2400) as lost:
        assert lost.status() == 200
        lost.events(5)
        with suspended(cluster.node("decode-0")):  # or its answer might be whole before
            victim = worker_of(cluster, lost.port)
            victim.kill()
            with pytest.raises((EOFError, ConnectionError)):
                lost.events()
    statuses: dict[int, int] = {}

    def replaced() -> bool:
        with httpx.Client(base_url=cluster.url, timeout=60.0, trust_env=False) as http:
            status = http.post("/v2/models/m/infer", content=body_of([1, 2, 3], max_new_tokens=2)).status_code
        statuses[status] = statuses.get(status, 0) + 1
        return len({worker.pid for worker in cluster.workers()} - {victim.pid}) == 2

    wait_until(replaced, "a new worker is there")
    fresh = max(cluster.workers(), key=psutil.Process.create_time)
    with cluster.only_worker(fresh):
        replaced()
    assert set(statuses) == {200}
    watch.wait_idle(*NODES)
    wait_until(lambda: cluster.metrics()["num_requests_running"] == 0, "its gauges do not count any more")


def test_worker_is_asked_to_end(cluster: Served, undisturbed: list[int]) -> None:
    """It finishes its requests; another one comes."""
    with RawRequest(cluster, PROMPT, streamed=True, max_new_tokens=LONG) as request:
        assert request.status() == 200
        events = request.events(5)
        victim = worker_of(cluster, request.port)
        victim.terminate()
        events += request.events()
    assert tokens_of(events) == undisturbed
    wait_until(lambda: has_ended(victim), "it has ended")


def test_gunicorn_is_killed(cluster: Served, undisturbed: list[int]) -> None:
    """Its workers go with it; who connects meanwhile waits for the next ones."""
    victim, workers = cluster.children()["router"], cluster.workers()
    with RawRequest(cluster, PROMPT, streamed=True, max_new_tokens=2400) as lost:
        assert lost.status() == 200
        victim.kill()
        with pytest.raises((EOFError, ConnectionError)):
            lost.events()
    wait_until(lambda: all(has_ended(worker) for worker in workers), "its workers are gone")
    with RawRequest(cluster, PROMPT, streamed=False, max_new_tokens=LONG) as waits:
        assert waits.status() == 200
        assert waits.body()["outputs"][0]["data"] == undisturbed


@pytest.mark.parametrize("name", NODES)
def test_node_sleeps_shortly(cluster: Served, watch: NodeWatch, undisturbed: list[int], name: str) -> None:
    """Long enough to be suspect, not to be given up."""
    with RawRequest(cluster, PROMPT, streamed=True, max_new_tokens=LONG) as request:
        assert request.status() == 200
        events = request.events(20)
        with suspended(cluster.node(name)):
            wait_until(lambda: watch.views()[name].state is LinkState.SUSPECT, "its silence is noticed")
        events += request.events()
    assert tokens_of(events) == undisturbed


@pytest.mark.parametrize("name", NODES)
def test_node_sleeps_until_it_is_given_up(cluster: Served, undisturbed: list[int], name: str) -> None:
    pids = {child: process.pid for child, process in cluster.children().items()}
    with RawRequest(cluster, PROMPT, streamed=True, max_new_tokens=LONG) as request:
        assert request.status() == 200
        events = request.events(20)
        with suspended(cluster.node(name)):
            wait_until(lambda: not cluster.is_ready(), "it is missed")
        wait_until(cluster.is_ready, "it is back")
        events += request.events()
    assert tokens_of(events) == undisturbed
    assert {child: process.pid for child, process in cluster.children().items()} == pids


@pytest.mark.rule(11)
def test_proxy_is_killed(cluster: Served) -> None:
    """Membership freezes meanwhile, and new lives are heard of again after it."""
    victim = cluster.node("proxy")
    victim.kill()
    with cluster.client() as http:
        answer = http.post("/v2/models/m/infer", content=body_of(PROMPT, max_new_tokens=5))
        assert answer.status_code == 200
    wait_until(lambda: "proxy" in cluster.children() and cluster.node("proxy").pid != victim.pid, "a new proxy")
    cluster.node("decode-0").kill()
    wait_until(lambda: not cluster.is_ready(), "the node is missed")
