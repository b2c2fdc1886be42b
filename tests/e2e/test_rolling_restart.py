"""Every process is replaced, one after the other, under load: no client whose connection lives loses a request."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import httpx
import pytest

from tests.chaos.client import End, Record
from tests.chaos.client_requests import Sizes, pool
from tests.chaos.load import ClientLoad, Target, learn
from tests.e2e.conftest import Serve
from tests.support.bodies import body_of
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.node_watch import NodeWatch
from tests.support.processes import num_listening, peers
from tests.support.serve import Served, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
PAIRS = (("prefill-0", "decode-0"), ("prefill-1", "decode-1"))
NODES = tuple(chain.from_iterable(PAIRS))
CLIENTS = 8
THINK_S = 0.2
FINE = {End.COMPLETE, End.LEFT, End.TIMEOUT, End.IDLE_CLOSED}
"""A kept-alive connection may be closed by the worker just as the next request is sent: any HTTP client knows that."""
AGAIN = FINE | {End.REFUSED}
"""A worker that is leaving answers 503 on a connection that it still has, before any work."""


@pytest.fixture(scope="module")
def cluster(serve: Serve) -> Iterator[Served]:
    with serve(prefill=2, decode=2, settings={"serve.restart_min_s": 0.1}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def watch(cluster: Served) -> Iterator[NodeWatch]:
    with NodeWatch(cluster.members_endpoint()) as watch:
        yield watch


@pytest.fixture(scope="module")
def target(cluster: Served) -> Target:
    """What the clients ask for, and what the undisturbed cluster answers."""
    target = Target(cluster.port, cluster.model, pool(3, 32, Sizes(outputs=(1, 8, 60, 200), vocab_size=VOCAB_SIZE)))
    target.expected_ids = asyncio.run(learn(target))
    return target


def restarts_under_load(target: Target, *restarts: Callable[[], None]) -> list[Record]:
    """Let clients ask before, while and after each of these happens."""

    async def run() -> list[Record]:
        load = ClientLoad(target, 5, CLIENTS, THINK_S)
        answered = asyncio.Event()
        loading = asyncio.ensure_future(load.run(lambda _: answered.set()))
        for restart in (*restarts, lambda: None):
            for _ in range(2 * CLIENTS):
                answered.clear()
                await answered.wait()
            await asyncio.to_thread(restart)
        load.stop()
        await loading
        return load.records

    return asyncio.run(run())


def restart_nodes(cluster: Served, watch: NodeWatch, names: Sequence[str]) -> None:
    """SIGTERM, and wait until their next lives serve."""
    lives = {name: watch.views()[name].said[0] for name in names}
    for name in names:
        cluster.node(name).terminate()
    wait_until(lambda: all(watch.views()[name].said[0] != lives[name] for name in names), f"{names} are back", 120.0)


def replace_workers(cluster: Served) -> None:
    """What gunicorn does at SIGHUP: new workers first, then the old ones finish what they have."""
    old = {worker.pid for worker in cluster.workers()}
    cluster.node("router").send_signal(signal.SIGHUP)
    wait_until(lambda: len(now := {w.pid for w in cluster.workers()}) == 2 and not now & old, "all are new", 90.0)
    wait_until(cluster.is_ready, "the new ones serve", 90.0)


def restart_proxy(cluster: Served) -> None:
    """No process needs it while nothing new comes."""
    old = cluster.node("proxy")
    old.terminate()
    wait_until(lambda: cluster.children().get("proxy", old).pid != old.pid, "the proxy is back", 60.0)


def wrong_of(records: list[Record], allowed: set[End]) -> list[Record]:
    """Records that ended otherwise, or with other tokens."""
    return [record for record in records if record.wrong or record.end not in allowed]


def test_nodes_and_proxy(cluster: Served, watch: NodeWatch, target: Target) -> None:
    """No client notices."""
    nodes = [partial(restart_nodes, cluster, watch, pair) for pair in PAIRS]
    assert wrong_of(restarts_under_load(target, *nodes, partial(restart_proxy, cluster)), FINE) == []
    watch.wait_idle(*NODES)


@pytest.mark.rule(37)
def test_who_had_connected_to_a_worker_that_leaves(cluster: Served) -> None:
    """Its request comes when the worker has heard the signal: it is refused with a time to ask again, and asks another
    one."""
    worker = cluster.workers()[0]
    body = body_of([1, 2, 3], max_new_tokens=1)
    with contextlib.ExitStack() as stack:
        with cluster.only_worker(worker):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", cluster.port), timeout=120.0))
            wait_until(lambda: client.getsockname() in peers(worker), "the connection is accepted")
        listening = num_listening(worker)
        worker.terminate()
        wait_until(lambda: num_listening(worker) < listening, "it accepts no more")
        head = f"POST /v2/models/{cluster.model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        answer = client.makefile("rb").read().lower()
    assert answer.startswith(b"http/1.1 503 ")
    assert b"\r\nretry-after: " in answer
    assert httpx.post(cluster.infer_url, content=body, trust_env=False, timeout=120.0).status_code == 200
    wait_until(lambda: len({w.pid for w in cluster.workers()} - {worker.pid}) == 2, "another one is there", 90.0)


def test_workers(cluster: Served, watch: NodeWatch, target: Target) -> None:
    """Answers under way are finished by the worker that began them."""
    records = restarts_under_load(target, partial(replace_workers, cluster))
    assert wrong_of(records, AGAIN) == []
    watch.wait_idle(*NODES)
