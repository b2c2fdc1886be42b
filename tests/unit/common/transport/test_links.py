"""Node and link sockets over real tcp, ipc and inproc connections."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.common.base.errors import ConfigError, InvariantError
from kvferry.common.base.ids import Incarnation, new_incarnation
from kvferry.common.config.protocol import Limits
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.monitor import ConnectionEvent, LinkMonitor
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.nonblocking import SendResult
from kvferry.common.transport.options import SocketOptions
from tests.support.transport import bind_again, ipc_endpoint, take_one, transport_context, wait_until

OPTIONS = SocketOptions.control(Limits())
TIGHT = SocketOptions(high_water=2, outbox_messages=5, heartbeat_s=0.0, reconnect_min_s=0.01, reconnect_max_s=0.02)
"""Without heartbeats: with them a link has no receive high-water mark."""


@pytest.fixture
def context() -> Iterator[TransportContext]:
    with transport_context() as made:
        yield made


@pytest.fixture(params=["tcp", "ipc", "inproc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "ipc":
        return ipc_endpoint(tmp_path)
    return {"tcp": "tcp://127.0.0.1:*", "inproc": "inproc://node"}[request.param]


class Pair:
    """A node and one client."""

    def __init__(self, context: TransportContext, endpoint: str, options: SocketOptions = OPTIONS) -> None:
        self.context = context
        self.options = options
        self.self_id = new_incarnation()
        self.node = NodeSocket(context, options)
        self.bound = self.node.bind(endpoint)
        self.link = LinkSocket(context, self.self_id, options)
        self.monitor = LinkMonitor(context, self.link)
        self.link.open()
        self.monitor.open()
        self.link.connect(self.bound)

    def exchange(self) -> None:
        """Send one message each way."""
        self.link.send([b"up"])
        assert take_one(self.node.receive, step=self.link.flush) == (self.self_id, [b"up"])
        assert self.node.send(self.self_id, [b"down", b"2"]) is SendResult.SENT
        assert take_one(self.link.receive) == [b"down", b"2"]

    def restart_node(self) -> None:
        """A new incarnation at the same address."""
        self.node.close()
        self.node = NodeSocket(self.context, self.options)
        bind_again(self.node, self.bound)

    def check_invariants(self) -> None:
        self.node.check_invariants()
        self.link.check_invariants()

    def close(self) -> None:
        self.check_invariants()
        self.monitor.close()
        self.link.close()
        self.node.close()


@pytest.fixture
def pair(context: TransportContext, endpoint: str) -> Iterator[Pair]:
    made = Pair(context, endpoint)
    yield made
    made.close()


def test_messages_pass_in_both_directions(pair: Pair):
    pair.exchange()
    pair.exchange()
    assert not pair.node.dropped


def test_a_link_may_connect_before_the_node_binds(context: TransportContext, tmp_path: Path):
    link = LinkSocket(context, new_incarnation(), TIGHT)
    link.open()
    link.connect(ipc_endpoint(tmp_path))
    assert link.send([b"early"]) is SendResult.QUEUED
    node = NodeSocket(context, OPTIONS)
    node.bind(ipc_endpoint(tmp_path))
    assert take_one(node.receive, step=link.flush)[1] == [b"early"]
    link.close()
    node.close()


def test_links_find_the_next_incarnation_at_the_same_address(context: TransportContext, endpoint: str):
    pair = Pair(context, endpoint, TIGHT)
    pair.exchange()
    pair.restart_node()
    if pair.bound.startswith("inproc"):
        pair.link.reconnect()
    received: list[bytes] = []

    def is_received() -> bool:
        pair.link.try_send([b"again"])  # may be lost with the old connection
        received.extend(bytes(frames[0]) for _, frames in pair.node.receive())
        return bool(received)

    wait_until(is_received)
    assert set(received) == {b"again"}
    assert pair.node.send(pair.self_id, [b"back"]) is SendResult.SENT
    assert take_one(pair.link.receive) == [b"back"]
    pair.close()


def test_reconnect_works_while_connected(context: TransportContext, endpoint: str):
    pair = Pair(context, endpoint, TIGHT)
    pair.exchange()
    for _ in range(3):
        pair.link.reconnect()
        pair.exchange()
    pair.close()


@pytest.mark.rule(8)
def test_messages_for_a_dead_incarnation_are_not_sent_to_the_next(context: TransportContext, tmp_path: Path):
    pair = Pair(context, ipc_endpoint(tmp_path), TIGHT)
    pair.exchange()
    pair.node.close()
    wait_until(lambda: ConnectionEvent.DISCONNECTED in list(pair.monitor.receive()))
    wait_until(lambda: pair.link.send([b"stale"]) is SendResult.QUEUED)
    assert pair.link.discard() == 1
    pair.restart_node()
    pair.link.send([b"fresh"])
    assert take_one(pair.node.receive, step=pair.link.flush)[1] == [b"fresh"]
    assert list(pair.node.receive()) == []
    pair.close()


def test_the_monitor_reports_connects_and_disconnects(context: TransportContext, tmp_path: Path):
    pair = Pair(context, ipc_endpoint(tmp_path), TIGHT)
    events: list[ConnectionEvent] = []

    def reported(*expected: ConnectionEvent) -> bool:
        events.extend(pair.monitor.receive())
        return events == list(expected)

    wait_until(lambda: reported(ConnectionEvent.CONNECTED))
    pair.restart_node()
    wait_until(lambda: reported(ConnectionEvent.CONNECTED, ConnectionEvent.DISCONNECTED, ConnectionEvent.CONNECTED))
    pair.close()


def test_the_monitor_may_close_after_its_link(context: TransportContext):
    pair = Pair(context, "tcp://127.0.0.1:*")
    pair.link.close()
    pair.close()


@pytest.mark.rule(8)
@pytest.mark.parametrize("peer", [new_incarnation(), Incarnation("a1" * 16)])
def test_an_unknown_peer_is_unreachable(pair: Pair, peer: Incarnation):
    assert pair.node.send(peer, [b"x"]) is SendResult.UNREACHABLE
    assert pair.node.dropped["unreachable"] == 1
    assert not pair.node.has_pending


def test_a_peer_that_left_is_unreachable(pair: Pair):
    pair.exchange()
    pair.monitor.close()
    pair.link.close()
    wait_until(lambda: pair.node.send(pair.self_id, [b"x"]) is SendResult.UNREACHABLE)


def fill_until_queued(pair: Pair) -> None:
    """Send to a client that does not read, until ZeroMQ accepts no more."""
    while pair.node.send(pair.self_id, [b"x" * 100_000]) is not SendResult.QUEUED:
        assert not pair.node.dropped


def fill_until_down(pair: Pair) -> int:
    """Send to a client that does not read, until its outbox overflows; returns the number of messages."""
    sent = 0
    while pair.node.send(pair.self_id, [sent.to_bytes(4, "little"), b"x" * 100_000]) is not SendResult.UNREACHABLE:
        sent += 1
        assert sent < 1000
    return sent


@pytest.mark.rule(30)
def test_a_slow_peer_fills_its_outbox_and_no_more(context: TransportContext, endpoint: str):
    pair = Pair(context, endpoint, TIGHT)
    pair.exchange()
    fill_until_down(pair)
    assert pair.node.dropped["overflow"] == TIGHT.outbox_messages + 1
    assert not pair.node.has_pending
    pair.close()


@pytest.mark.rule(8)
def test_a_slow_peer_does_not_delay_another(context: TransportContext, endpoint: str):
    pair = Pair(context, endpoint, TIGHT)
    pair.exchange()
    fill_until_queued(pair)
    other = LinkSocket(context, new_incarnation(), TIGHT)
    other.open()
    other.connect(pair.bound)
    other.send([b"hello"])
    peer, _ = take_one(pair.node.receive, step=other.flush)
    assert pair.node.send(peer, [b"not delayed"]) is SendResult.SENT
    assert take_one(other.receive) == [b"not delayed"]
    pair.check_invariants()
    other.close()
    pair.close()


def test_messages_to_a_slow_peer_keep_their_order(context: TransportContext, endpoint: str):
    pair = Pair(context, endpoint, TIGHT)
    pair.exchange()
    sent = 0
    while len(pair.node._outboxes.get(pair.self_id, ())) < TIGHT.outbox_messages:
        pair.node.send(pair.self_id, [sent.to_bytes(4, "little"), b"x" * 100_000])
        sent += 1
    got: list[int] = []

    def read() -> bool:
        assert pair.node.flush() == []
        got.extend(int.from_bytes(frames[0], "little") for frames in pair.link.receive())
        return len(got) == sent

    wait_until(read)
    assert got == list(range(sent))
    assert not pair.node.has_pending
    pair.close()


def test_the_outbox_of_a_peer_that_left_is_dropped(context: TransportContext, endpoint: str):
    pair = Pair(context, endpoint, TIGHT)
    pair.exchange()
    fill_until_queued(pair)
    pair.monitor.close()
    pair.link.close()

    def noticed() -> bool:
        assert list(pair.node.receive()) == []  # ZeroMQ closes a connection once all its messages are read
        if pair.node.flush() == [pair.self_id]:
            return True
        return not pair.node.has_pending and pair.node.send(pair.self_id, [b"x"]) is SendResult.UNREACHABLE

    wait_until(noticed)
    assert pair.node.dropped["unreachable"] >= 1
    assert not pair.node.has_pending
    pair.close()


def test_a_full_link_queues_and_then_counts_as_down(context: TransportContext):
    link = LinkSocket(context, new_incarnation(), TIGHT)
    link.open()
    link.connect("tcp://127.0.0.1:1")  # no process listens: with IMMEDIATE, ZeroMQ accepts nothing
    results = [link.send([b"x"]) for _ in range(TIGHT.outbox_messages + 1)]
    assert results == [SendResult.QUEUED] * TIGHT.outbox_messages + [SendResult.UNREACHABLE]
    assert link.dropped == TIGHT.outbox_messages + 1
    assert not link.has_pending
    link.check_invariants()
    link.close()


@pytest.mark.rule(8)
def test_a_peer_that_reconnects_replaces_its_old_connection(context: TransportContext, endpoint: str):
    pair = Pair(context, endpoint)
    pair.exchange()
    again = LinkSocket(context, pair.self_id, OPTIONS)
    again.open()
    again.connect(pair.bound)
    again.send([b"me again"])
    assert take_one(pair.node.receive, step=again.flush) == (pair.self_id, [b"me again"])
    assert pair.node.send(pair.self_id, [b"x"]) is SendResult.SENT
    assert take_one(again.receive) == [b"x"]
    again.close()
    pair.close()


def test_a_peer_without_an_incarnation_is_dropped_and_counted(pair: Pair):
    import zmq

    socket = pair.context.open_socket(zmq.DEALER, "nameless")
    socket.connect(pair.bound)
    socket.send(b"who am I")
    wait_until(lambda: not list(pair.node.receive()) and pair.node.dropped["no_incarnation"])
    pair.context.close_socket(socket)
    pair.exchange()


def test_an_oversized_frame_breaks_only_its_own_connection(context: TransportContext, tmp_path: Path):
    small = SocketOptions(max_frame_bytes=1000, reconnect_min_s=0.01, reconnect_max_s=0.02)
    pair = Pair(context, ipc_endpoint(tmp_path), small)
    pair.exchange()
    other = LinkSocket(context, new_incarnation(), small)
    other.open()
    other.connect(pair.bound)
    other.send([b"hello"])
    peer, _ = take_one(pair.node.receive, step=other.flush)
    pair.link.send([b"x" * 1001])
    wait_until(lambda: ConnectionEvent.DISCONNECTED in list(pair.monitor.receive()))
    assert list(pair.node.receive()) == []
    assert pair.node.send(peer, [b"still here"]) is SendResult.SENT
    assert take_one(other.receive) == [b"still here"]
    other.close()
    pair.close()


@pytest.mark.rule(38)
@pytest.mark.parametrize("remote", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://eth0:0"])
def test_a_bind_beyond_loopback_is_refused(context: TransportContext, remote: str):
    node = NodeSocket(context, OPTIONS)
    with pytest.raises(ConfigError, match="other hosts"):
        node.bind(remote)
    node.close()


def test_allow_remote_permits_a_bind_beyond_loopback(context: TransportContext):
    node = NodeSocket(context, OPTIONS)
    assert node.bind("tcp://0.0.0.0:0", allow_remote=True).startswith("tcp://0.0.0.0:")
    node.close()


@pytest.mark.parametrize("local", ["tcp://localhost:0", "tcp://127.0.0.2:*"])
def test_loopback_may_always_be_bound(context: TransportContext, local: str):
    node = NodeSocket(context, OPTIONS)
    assert int(node.bind(local).rpartition(":")[2]) > 0
    node.close()


def test_an_address_in_use_is_a_configuration_error(pair: Pair):
    second = NodeSocket(pair.context, OPTIONS)
    with pytest.raises(ConfigError, match=r"in use|listens there"):
        second.bind(pair.bound)
    second.close()
    pair.exchange()


def test_an_inproc_name_is_free_as_soon_as_its_node_is_closed(context: TransportContext):
    """libzmq alone frees it later, in a thread of its own: without unbind, one in five such binds fails."""
    for _ in range(200):
        node = NodeSocket(context, OPTIONS)
        node.bind("inproc://again")
        node.close()


def test_closing_removes_the_ipc_file(context: TransportContext, tmp_path: Path):
    node = NodeSocket(context, OPTIONS)
    node.bind(ipc_endpoint(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    node.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_leaves_a_file_that_another_process_has_bound(context: TransportContext, tmp_path: Path):
    node = NodeSocket(context, OPTIONS)
    node.bind(ipc_endpoint(tmp_path))
    (tmp_path / "s").rename(tmp_path / "old")
    (tmp_path / "s").touch()
    node.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "s"]


@pytest.mark.parametrize("wrong", ["tcp://*:5555", "tcp://127.0.0.1:0", "tcp://0.0.0.0:1", "udp://127.0.0.1:1"])
def test_connecting_to_an_invalid_endpoint_is_a_configuration_error(context: TransportContext, wrong: str):
    link = LinkSocket(context, new_incarnation(), OPTIONS)
    link.open()
    with pytest.raises(ConfigError):
        link.connect(wrong)
    link.close()


def test_the_context_lists_open_sockets_and_does_not_close_before_them(context: TransportContext):
    link = LinkSocket(context, new_incarnation(), OPTIONS)
    link.open()
    assert context.open_sockets() == ("link socket",)
    with pytest.raises(InvariantError, match="link socket"):
        context.close()
    link.close()
    link.close()
    assert context.open_sockets() == ()
