"""Announcements through real proxies, in a thread and in a child process."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from kvferry.common.base.errors import ConfigError
from kvferry.common.base.ids import Incarnation, new_incarnation
from kvferry.common.config.endpoints import with_key
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Announce, Envelope, WrongIncarnation
from kvferry.common.protocol.wire import encode
from kvferry.common.transport.announce import AnnouncementListener, Announcer, resolve_endpoint
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.proxy import AnnouncementProxy
from tests.support.keys import KeyRing
from tests.support.transport import DEADLINE_S, closing, ipc_endpoint, opened, transport_context, wait_until

FAST = Timers(heartbeat_s=0.01, resolve_s=0.02)
LIMITS = Limits()


@pytest.fixture
def context() -> Iterator[TransportContext]:
    with transport_context() as made:
        yield made


def announcement(name: str = "prefill-0") -> Envelope:
    message = Announce(name=name, role="prefill", model="smol", endpoint="tcp://127.0.0.1:5555")
    return Envelope(new_incarnation(), Incarnation(""), message)


@contextmanager
def proxy_in_thread(context: TransportContext, nodes: str, workers: str) -> Iterator[tuple[str, str]]:
    proxy = AnnouncementProxy(context)
    bound = proxy.bind(nodes, workers)
    thread = threading.Thread(target=proxy.run)
    thread.start()
    try:
        yield bound
    finally:
        proxy.stop()
        thread.join()
        proxy.close()
        proxy.close()


@contextmanager
def announcing(
    context: TransportContext,
    proxies: list[str],
    envelope: Envelope,
    resolve: Callable[[str], list[str]] = resolve_endpoint,
) -> Iterator[Announcer]:
    announcer = Announcer(context, proxies, FAST, LIMITS, resolve=resolve)
    announcer.start(envelope)
    try:
        yield announcer
    finally:
        announcer.close()
        announcer.close()


@contextmanager
def listening(context: TransportContext, endpoint: str) -> Iterator[AnnouncementListener]:
    listener = AnnouncementListener(context, LIMITS)
    listener.connect(endpoint)
    try:
        yield listener
    finally:
        listener.close()
        listener.close()


def wait_for_announcement(listener: AnnouncementListener, envelope: Envelope) -> None:
    wait_until(lambda: envelope in list(listener.receive()))


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "inproc"])
def test_every_worker_of_every_host_receives_an_announcement(context: TransportContext, scheme: str, tmp_path: Path):
    ends = [
        {"tcp": "tcp://127.0.0.1:0", "ipc": f"{ipc_endpoint(tmp_path)}{n}", "inproc": f"inproc://{n}"}[scheme]
        for n in range(4)
    ]
    node = announcement()
    with (
        proxy_in_thread(context, ends[0], ends[1]) as (nodes_a, workers_a),
        proxy_in_thread(context, ends[2], ends[3]) as (nodes_b, workers_b),
        listening(context, workers_a) as first,
        listening(context, workers_a) as second,
        listening(context, workers_b) as third,
        announcing(context, [nodes_a, nodes_b], node) as announcer,
    ):
        for listener in (first, second, third):
            wait_for_announcement(listener, node)
        changed = announcement("decode-0")
        announcer.change(changed)
        for listener in (first, second, third):
            wait_for_announcement(listener, changed)


def test_malformed_messages_are_counted_and_dropped(context: TransportContext):
    node = announcement()
    other = [bytes(f) for f in encode(Envelope(node.sender, Incarnation(""), WrongIncarnation()), LIMITS)]
    garbage = [[b"x"], [b"\x01\x01", b"{"], [b"\x09\x01", b"{}"], [b"", b"", b""], other]
    with (
        proxy_in_thread(context, "inproc://nodes", "inproc://workers") as (nodes, workers),
        listening(context, workers) as listener,
        announcing(context, [nodes], node),
    ):
        wait_for_announcement(listener, node)
        publisher = context.open_socket(zmq.PUB, "garbage")
        publisher.connect(nodes)
        rounds = 0

        def flood() -> bool:
            nonlocal rounds
            rounds += 1
            for frames in garbage:
                publisher.send_multipart(frames)
            assert {envelope.message for envelope in listener.receive()} <= {node.message}
            return listener.malformed >= len(garbage)

        wait_until(flood)
        assert listener.malformed <= rounds * len(garbage)
        wait_for_announcement(listener, node)
        context.close_socket(publisher)


@pytest.mark.rule(11)
def test_the_name_is_resolved_again_and_a_failed_lookup_changes_nothing(context: TransportContext):
    answers: list[list[str] | None] = []
    asked: list[str] = []
    node = announcement()

    def resolve(name: str) -> list[str]:
        asked.append(name)
        answer = answers[-1]
        if answer is None:
            raise OSError("the name service is down")
        return answer

    with (
        proxy_in_thread(context, "tcp://127.0.0.1:0", "inproc://workers-a") as (nodes_a, workers_a),
        proxy_in_thread(context, "tcp://127.0.0.1:0", "inproc://workers-b") as (nodes_b, workers_b),
        listening(context, workers_a) as at_a,
        listening(context, workers_b) as at_b,
    ):
        answers.append(None)
        with announcing(context, ["tcp://routers:5000"], node, resolve):
            wait_until(lambda: len(asked) >= 2)
            answers.append([nodes_a])
            wait_for_announcement(at_a, node)
            answers.append([nodes_a, nodes_b])
            wait_for_announcement(at_b, node)
            wait_for_announcement(at_a, node)
            answers.append([nodes_b])
            seen = len(asked)
            wait_until(lambda: len(asked) >= seen + 2)
            list(at_a.receive())  # sent before the announcer disconnected from this proxy
            wait_for_announcement(at_b, node)
            wait_until(lambda: not list(at_a.receive()))
            answers.append(None)
            seen = len(asked)
            wait_until(lambda: len(asked) >= seen + 2)
            list(at_b.receive())
            wait_for_announcement(at_b, node)
        assert set(asked) == {"tcp://routers:5000"}


def test_a_name_resolves_to_all_its_addresses():
    assert "tcp://127.0.0.1:5000" in resolve_endpoint("tcp://localhost:5000")
    assert resolve_endpoint("tcp://127.0.0.1:5000") == ["tcp://127.0.0.1:5000"]
    assert resolve_endpoint("tcp://[::1]:5000") == ["tcp://[::1]:5000"]
    assert resolve_endpoint("ipc://x/y") == ["ipc://x/y"]


@pytest.mark.parametrize("proxy", ["nowhere", "tcp://*:5000", "tcp://127.0.0.1:0"])
def test_an_announcer_refuses_a_proxy_that_cannot_be_connected_to(context: TransportContext, proxy: str):
    announcer = Announcer(context, [proxy], FAST, LIMITS)
    with pytest.raises(ConfigError):
        announcer.start(announcement())
    announcer.close()


@pytest.mark.rule(38)
def test_a_proxy_binds_beyond_loopback_only_if_allowed(context: TransportContext):
    for nodes, workers, allowed in (("tcp://*:0", "inproc://w", False), ("inproc://n", "tcp://*:0", True)):
        proxy = AnnouncementProxy(context)
        with pytest.raises(ConfigError, match="other hosts"):
            proxy.bind(nodes, workers, allow_remote=allowed)
        proxy.close()
    proxy = AnnouncementProxy(context)
    proxy.bind("tcp://*:0", "inproc://w2", allow_remote=True)
    proxy.close()


def test_announcers_and_listeners_reconnect_to_a_restarted_proxy(context: TransportContext, tmp_path: Path):
    nodes, workers = f"{ipc_endpoint(tmp_path)}n", f"{ipc_endpoint(tmp_path)}w"
    node = announcement()
    with listening(context, workers) as listener, announcing(context, [nodes], node):
        for _ in range(2):
            with proxy_in_thread(context, nodes, workers):
                wait_for_announcement(listener, node)
            wait_until(lambda: not list(listener.receive()))


CHILD = """
from kvferry.common.transport.proxy import run_proxy
run_proxy("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", on_bound=lambda *bound: print(*bound, flush=True))
print("done", flush=True)
"""


def test_as_a_child_process_it_forwards_until_sigterm(context: TransportContext):
    node = announcement()
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        nodes, workers = child.stdout.readline().split()
        with listening(context, workers) as listener, announcing(context, [nodes], node):
            wait_for_announcement(listener, node)
        child.send_signal(signal.SIGTERM)
        assert child.stdout.read() == "done\n"
        assert child.wait(DEADLINE_S) == 0


def test_as_a_child_process_it_ends_with_its_parent():
    parent = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), end="", flush=True)
child.stdout = None
sys.stdin.readline()
"""
    # The grandchild's stdout is a pipe of its parent; we see that it has ended when its stderr, our pipe, closes.
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("tcp://127.0.0.1:")
        process.kill()
        process.wait(DEADLINE_S)
        process.stderr.read()  # returns when the last process that holds it has ended


def test_a_full_worker_loses_announcements_and_blocks_no_other(context: TransportContext):
    """A worker that does not read does not keep announcements from another."""
    node = announcement()
    large = msgspec.structs.replace(node, message=msgspec.structs.replace(node.message, model="m" * 50_000))
    with (
        proxy_in_thread(context, "inproc://nodes", "inproc://workers") as (nodes, workers),
        listening(context, workers),
        listening(context, workers) as reading,
        announcing(context, [nodes], node) as announcer,
    ):
        wait_for_announcement(reading, node)
        announcer.change(large)
        wait_for_announcement(reading, large)


@pytest.mark.rule(38)
def test_with_keys_a_node_may_announce_and_a_router_may_not(tmp_path: Path):
    """The proxy of a router host admits nodes that announce and workers that listen."""
    keys = KeyRing(tmp_path / "keys")
    with closing() as stack:
        routers, nodes = opened(stack, keys.security("router")), opened(stack, keys.security("node"))
        for_nodes, for_workers = stack.enter_context(
            proxy_in_thread(routers, "tcp://127.0.0.1:0", ipc_endpoint(tmp_path))
        )
        listener = stack.enter_context(listening(routers, for_workers))
        node, impostor = announcement("real"), announcement("impostor")
        with announcing(routers, [for_nodes], impostor), announcing(nodes, [for_nodes], node):
            received: list[Envelope] = []
            wait_until(lambda: len(received) > 20, step=lambda: received.extend(listener.receive()))
        assert {envelope.sender for envelope in received} == {node.sender}


def test_resolved_addresses_keep_the_key():
    key = "0a" * 32
    assert resolve_endpoint(f"tcp://localhost:5?key={key}") == [
        f"{endpoint}?key={key}" for endpoint in resolve_endpoint("tcp://localhost:5")
    ]


@pytest.mark.rule(38)
def test_an_announcer_reconnects_after_a_proxy_without_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """ZeroMQ itself gives such a connection up for good."""
    keys = KeyRing(tmp_path / "keys")
    router = keys.security("router")
    endpoint, workers = with_key(f"{ipc_endpoint(tmp_path)}n", router.public), f"{ipc_endpoint(tmp_path)}w"
    node = announcement()
    with closing() as stack:
        nodes, routers, bare = opened(stack, keys.security("node")), opened(stack, router), opened(stack)
        announcer = stack.enter_context(announcing(nodes, [endpoint], node))
        with proxy_in_thread(bare, endpoint, workers):
            wait_until(lambda: announcer.given_up > 3)
        assert len([record for record in caplog.records if "announce_to" in record.getMessage()]) == 1
        _, for_workers = stack.enter_context(proxy_in_thread(routers, endpoint, workers))
        wait_for_announcement(stack.enter_context(listening(routers, for_workers)), node)
