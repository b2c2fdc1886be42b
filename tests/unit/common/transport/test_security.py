"""Keys on real sockets: which peers are admitted, which are refused and logged once, and that peers reconnect."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import zmq

from kvferry.common.base.errors import ConfigError, InvariantError
from kvferry.common.base.ids import Incarnation, new_incarnation
from kvferry.common.cluster.events import Event, LinkClosed, LinkConnected
from kvferry.common.config.endpoints import parse_endpoint, with_key
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Hello
from kvferry.common.transport.client_links import ClientLinks
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.monitor import ConnectionEvent, LinkMonitor
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.options import SocketOptions
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.poll_watcher import PollWatcher
from kvferry.common.transport.probe import ProbeResult, probe
from kvferry.common.transport.security import Security
from kvferry.common.transport.security_domain import SecurityDomain
from kvferry.common.transport.zap import MAX_LOGGED_PEERS, ZapHandler
from tests.support.eventually import PATIENCE_S
from tests.support.keys import KeyRing
from tests.support.transport import bind_again, closing, ipc_endpoint, opened, take_one, transport_context, wait_until

FAST = SocketOptions(reconnect_min_s=0.01, reconnect_max_s=0.02, heartbeat_s=0.05, heartbeat_timeout_s=PATIENCE_S)
HASTY = replace(FAST, heartbeat_timeout_s=0.5)
"""For refused peers: ZeroMQ ends a refused handshake at its timeout, and retries."""
FAST_TIMERS = Timers(reconnect_min_s=0.01, reconnect_max_s=0.02)
TCP = "tcp://127.0.0.1:*"


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "keys")


class Peers:
    """A node socket and clients in their own contexts. All are closed, and nothing may leak."""

    def __init__(self, stack: ExitStack, security: Security | None, options: SocketOptions = FAST) -> None:
        self._stack = stack
        self.options = options
        self.context = opened(stack, security)
        self.node = NodeSocket(self.context, options)
        stack.callback(lambda: self.node.close())
        self.bound = ""

    def bind(self, endpoint: str) -> str:
        self.bound = self.node.bind(endpoint)
        return self.bound

    def rebind(self) -> None:
        """A new incarnation at the same address."""
        self.node.close()
        self.node = NodeSocket(self.context, self.options)
        bind_again(self.node, self.bound)

    def client(
        self, security: Security | None, endpoint: str = "", *, hasty: bool = False
    ) -> tuple[LinkSocket, LinkMonitor, Incarnation]:
        context = opened(self._stack, security)
        self_id = new_incarnation()
        timeout_s = (HASTY if hasty else self.options).heartbeat_timeout_s
        link = LinkSocket(context, self_id, replace(self.options, heartbeat_timeout_s=timeout_s))
        monitor = LinkMonitor(context, link)
        link.open()
        monitor.open()
        self._stack.callback(link.close)
        self._stack.callback(monitor.close)
        link.connect(endpoint or self.bound)
        return link, monitor, self_id

    def exchange(self, client: tuple[LinkSocket, LinkMonitor, Incarnation]) -> None:
        """Send one message each way. The node must receive no other."""
        link, _, self_id = client
        link.send([b"up"])
        assert take_one(self.node.receive, step=link.flush) == (self_id, [b"up"])
        self.node.send(self_id, [b"down"])
        assert take_one(link.receive) == [b"down"]


@contextmanager
def peers(security: Security | None, options: SocketOptions = FAST) -> Iterator[Peers]:
    with closing() as stack:
        yield Peers(stack, security, options)


def is_disconnected(monitor: LinkMonitor) -> bool:
    return ConnectionEvent.DISCONNECTED in list(monitor.receive())


def is_refused(client: tuple[LinkSocket, LinkMonitor, Incarnation], times: int = 3) -> None:
    """The handshake fails again and again, and no message is sent."""
    link, monitor, _ = client
    seen: list[ConnectionEvent] = []
    link.send([b"let me in"])

    def failed() -> bool:
        link.flush()
        seen.extend(monitor.receive())
        return seen.count(ConnectionEvent.HANDSHAKE_FAILED) >= times

    wait_until(failed)
    assert ConnectionEvent.CONNECTED not in seen
    assert link.has_pending


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return TCP if request.param == "tcp" else ipc_endpoint(tmp_path)


def test_peers_with_listed_keys_connect_and_reconnect(keys: KeyRing, endpoint: str):
    with peers(keys.security("node")) as p:
        bound = p.bind(endpoint)
        assert parse_endpoint(bound).key == keys.public["node"].hex
        assert probe(bound, 5.0) is ProbeResult.ACCEPTED
        clients = [p.client(keys.security(role)) for role in ("node", "router")]
        for _ in range(2):
            for client in clients:
                p.exchange(client)
            p.rebind()
            for _, monitor, _ in clients:
                wait_until(partial(is_disconnected, monitor))


@pytest.mark.rule(38)
def test_an_unlisted_key_is_refused_until_it_is_listed(keys: KeyRing, endpoint: str, caplog: pytest.LogCaptureFixture):
    """It retries by itself. Its earlier message is not delivered before, and not lost."""
    public = keys.add("late", "node")
    late = keys.security("node", "late")  # loaded while the list has its key
    keys.forbid("late")
    with peers(keys.security("node")) as p, caplog.at_level(logging.WARNING, "kvferry.security"):
        p.bind(endpoint)
        client = p.client(late, hasty=True)
        is_refused(client, times=5)
        p.exchange(p.client(keys.security("router")))
        logged = [record.getMessage() for record in caplog.records]
        assert len(logged) == 1
        assert public.hex in logged[0]
        keys.allow("late", public)
        assert take_one(p.node.receive, step=client[0].flush) == (client[2], [b"let me in"])


def test_a_removed_key_cannot_reconnect(keys: KeyRing):
    keys.add("old", "node")
    with peers(keys.security("node")) as p:
        p.bind(TCP)
        client = p.client(keys.security("node", "old"), hasty=True)
        p.exchange(client)
        keys.forbid("old")
        p.rebind()
        wait_until(partial(is_disconnected, client[1]))
        is_refused(client)


@pytest.mark.rule(38)
@pytest.mark.parametrize("wrong", ["server key", "role", "no keys"])
def test_an_unauthenticated_peer_delivers_no_message(keys: KeyRing, wrong: str):
    options = replace(FAST, domain=SecurityDomain.KV)
    with peers(keys.security("node"), options) as p:
        bound = p.bind(TCP)
        if wrong == "server key":
            impostor = keys.add("impostor", "node")
            is_refused(p.client(keys.security("node"), with_key(bound, impostor.hex), hasty=True))
        elif wrong == "role":  # a router's key moves no KV
            is_refused(p.client(keys.security("router"), hasty=True))
        else:
            link, monitor, _ = p.client(None, bound.partition("?")[0])
            link.send([b"let me in"])
            wait_until(lambda: ConnectionEvent.GAVE_UP in list(monitor.receive()), step=link.flush)
            assert link.has_pending
        p.exchange(p.client(keys.security("node")))


@pytest.mark.rule(38)
def test_a_client_connects_only_to_a_listed_key_of_the_right_role(keys: KeyRing):
    with peers(keys.security("node")) as p:
        bound = p.bind(TCP)
        for wrong in (bound.partition("?")[0], with_key(bound, keys.public["router"].hex), with_key(bound, "00" * 32)):
            with pytest.raises(ConfigError, match=r"cannot connect to tcp://.*key"):
                p.client(keys.security("router"), wrong)
        with pytest.raises(ConfigError, match="this process has no keys"):
            p.client(None, bound)


@pytest.mark.rule(38)
def test_without_a_handler_no_peer_is_admitted(keys: KeyRing):
    """A failing handler must not admit peers."""
    security = keys.security("node")
    with peers(None) as p:
        security.secure_server(socket := p.context.open_socket(zmq.ROUTER, "bare"), SecurityDomain.CONTROL)
        socket.bind("tcp://127.0.0.1:*")
        bound = with_key(socket.getsockopt_string(zmq.LAST_ENDPOINT), security.public)
        is_refused(p.client(keys.security("router"), bound, hasty=True))
        assert not socket.poll(0)
        p.context.close_socket(socket)


def test_each_context_has_its_own_list(keys: KeyRing, tmp_path: Path):
    """Two clusters in one process: each refuses the keys of the other."""
    other = KeyRing(tmp_path / "other")
    other.allow("foreign", keys.public["node"])  # they know the address, and are refused
    with closing() as stack:
        p, q = Peers(stack, keys.security("node")), Peers(stack, other.security("node"))
        p.bind(TCP)
        q.bind(TCP)
        q.exchange(q.client(other.security("router")))
        is_refused(q.client(other.security("router"), p.bound, hasty=True))
        p.exchange(p.client(keys.security("router")))


def test_kv_may_be_without_keys_where_control_has_them(keys: KeyRing):
    security = keys.security("node", kv=False)
    with closing() as stack:
        p, kv = Peers(stack, security), Peers(stack, security, replace(FAST, domain=SecurityDomain.KV))
        assert "?key=" in p.bind(TCP)
        assert "?key=" not in kv.bind(TCP)
        kv.exchange(kv.client(keys.security("node", kv=False)))
        with pytest.raises(ConfigError, match="runs without keys"):
            kv.client(keys.security("node"))
        with pytest.raises(ConfigError, match="other hosts"):
            NodeSocket(kv.context, kv.options).bind("tcp://0.0.0.0:*")


def test_keys_permit_a_bind_beyond_loopback(keys: KeyRing, caplog: pytest.LogCaptureFixture):
    with peers(keys.security("node")) as p:
        p.bind("tcp://0.0.0.0:*")
        assert not caplog.records


def test_a_remote_bind_without_keys_is_logged_once(caplog: pytest.LogCaptureFixture):
    with transport_context() as context:
        for _ in range(2):
            node = NodeSocket(context, FAST)
            node.bind("tcp://0.0.0.0:*", allow_remote=True)
            node.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "NO KEYS" in caplog.records[0].getMessage()


def test_a_role_binds_only_its_own_sockets(keys: KeyRing):
    with (
        transport_context(keys.security("router")) as context,
        pytest.raises(InvariantError, match="router must not bind"),
    ):
        NodeSocket(context, FAST).bind(TCP)


class Links:
    """ClientLinks in a poll loop, with a Hello in each iteration."""

    def __init__(self, stack: ExitStack, security: Security | None) -> None:
        context = opened(stack, security)
        self.loop = PollLoop()
        self.events: list[Event] = []
        self.links = ClientLinks(
            context,
            new_incarnation(),
            Limits(),
            FAST_TIMERS,
            PollWatcher(self.loop, lambda call: call()),
            self.events.append,
            logging.getLogger("tests.links"),
        )
        stack.callback(self.links.close_all)

    def connects(self, endpoint: str) -> None:
        """Send a Hello in each iteration, as a core does until it is answered."""
        self.run_until(endpoint, lambda: LinkConnected(endpoint) in self.events)

    def run_until(self, endpoint: str, condition: Callable[[], bool]) -> None:
        def iterate() -> None:
            self.links.send_unaddressed(endpoint, Hello(kind="worker", name="w"))
            self.loop.run_once(0.005)
            self.links.flush()

        wait_until(condition, step=iterate)


@pytest.mark.rule(38)
@pytest.mark.parametrize("first", ["no keys", "not listed"])
def test_links_connect_as_soon_as_they_are_admitted(keys: KeyRing, first: str, caplog: pytest.LogCaptureFixture):
    """ZeroMQ gives up a connection to a process without keys; the link does not. Each problem is logged once."""
    public = keys.add("second", "node")
    listed = keys.security("node", "second")
    with closing() as stack:
        p = Peers(stack, listed if first == "not listed" else None)
        bound = with_key(p.bind(TCP), public.hex)
        if first == "no keys":
            links = Links(stack, keys.security("router"))
            links.links.open(bound)
            links.run_until(bound, lambda: links.events.count(LinkClosed(bound)) > 8)
            p.node.close()
            p.context = opened(stack, listed)
            stack.callback(lambda: p.node.close())
            p.bound = bound
            p.rebind()
        else:
            keys.forbid("second")
            links = Links(stack, keys.security("router"))
            links.links.open(bound)
            for _ in range(5):
                links.links.send_unaddressed(bound, Hello(kind="worker", name="w"))
            keys.allow("second", public)
        links.connects(bound)
        assert len([record for record in caplog.records if record.name == "tests.links"]) == 1
        links.links.close(bound)


def test_the_log_of_refused_keys_is_bounded(caplog: pytest.LogCaptureFixture):
    handler = ZapHandler(lambda domain, key: False)
    context = zmq.Context()
    handler.start(context)
    client = context.socket(zmq.REQ)
    client.connect("inproc://zeromq.zap.01")
    for number in range(MAX_LOGGED_PEERS + 10):
        client.send_multipart([b"1.0", b"7", b"kv", b"10.0.0.9", b"", b"CURVE", number.to_bytes(32, "little")])
        assert client.recv_multipart()[:3] == [b"1.0", b"7", b"300"]
    client.send_multipart([b"1.0", b"8", b"kv", b"10.0.0.9", b"", b"PLAIN", b"user", b"word"])
    assert client.recv_multipart()[:3] == [b"1.0", b"8", b"500"]
    assert len(caplog.records) == MAX_LOGGED_PEERS + 1
    with pytest.raises(InvariantError):
        handler.start(context)
    client.close()
    handler.close()
    handler.close()
    context.term()


def test_configured_endpoints_get_the_only_key_of_their_role(keys: KeyRing):
    security = keys.security("router")
    node, router = keys.public["node"].hex, keys.public["router"].hex
    assert security.completed("router.nodes", ("tcp://a:1", "inproc://b"), "node") == (
        f"tcp://a:1?key={node}",
        "inproc://b",
    )
    with pytest.raises(ConfigError, match=r"router.nodes: .*with the role node"):
        security.completed("router.nodes", (f"tcp://a:1?key={router}",), "node")
    second = keys.add("node-2", "node").hex
    assert security.completed("router.nodes", (f"tcp://a:1?key={second}",), "node") == (f"tcp://a:1?key={second}",)
    with pytest.raises(ConfigError, match=r"router.nodes: .*has 2 keys of the role node"):
        security.completed("router.nodes", ("tcp://a:1",), "node")


def test_a_process_whose_own_key_is_not_listed_does_not_start(keys: KeyRing):
    keys.forbid("node")
    with pytest.raises(ConfigError, match=r"security.allowed_keys: .*own key, public node [0-9a-f]{64}"):
        keys.security("node")
