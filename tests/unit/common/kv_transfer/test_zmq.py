"""The `zmq` mover between real sockets: what arrives, what does not, and what is told about it."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvferry.common.base.errors import (
    ConfigError,
    InvariantError,
)
from kvferry.common.base.ids import (
    Incarnation,
    new_incarnation,
)
from kvferry.common.cluster.events import (
    KvSendFailed,
    PieceArrived,
    PieceBad,
    PieceSent,
    PiecesStopped,
)
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv_transfer.send_queue import Window
from kvferry.common.kv_transfer.zmq_backend import ZmqKvMover, window_for
from kvferry.common.protocol.messages import Envelope, HelloRefused, Piece
from kvferry.common.protocol.wire import encode
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.options import SocketOptions
from tests.support.keys import KeyRing
from tests.support.kv_memory import MemoryCache, Posted, key_between, piece_of
from tests.support.transport import (
    DEADLINE_S,
    closing,
    ipc_endpoint,
    nothing_left,
    opened,
    take_one,
    transport_context,
    wait_until,
)

TABLE = (3, 1, 6)
WINDOW = Window(num_bytes=1_000_000, num_pieces=4, stall_s=DEADLINE_S)


class Node:
    """One process life with a cache and a mover."""

    def __init__(
        self,
        context: TransportContext,
        endpoint: str = "tcp://127.0.0.1:0",
        *,
        cache: MemoryCache | None = None,
        checksum: bool = False,
        window: Window = WINDOW,
        own: Incarnation | None = None,
    ) -> None:
        self.self_id = own or new_incarnation()
        self.cache = cache or MemoryCache()
        self.posted = Posted()
        self.mover = ZmqKvMover(
            context, self.self_id, endpoint, self.cache, Limits(), self.posted, checksum=checksum, window=window
        )
        self.endpoint = self.mover.start()

    def count(self, what: str) -> int:
        """Of what was received or dropped."""
        return self.mover.counts()[1][what]

    def close(self) -> None:
        self.mover.close()
        self.mover.check_invariants()


def threads_after_a_large_frame() -> tuple[int, int]:
    """Numbers of threads in a process that was prepared, before it sends anything and after a frame without a copy."""
    context = TransportContext()
    context.prepare_zero_copy()
    before = threading.active_count()
    node = NodeSocket(context, SocketOptions())
    link = LinkSocket(context, new_incarnation(), SocketOptions(zero_copy=True))
    link.open()
    link.connect(node.bind("inproc://warm"))
    link.send([b"x" * 200_000])
    take_one(node.receive)
    link.close()
    node.close()
    context.close()
    return before, threading.active_count()


def test_the_first_large_piece_starts_no_thread() -> None:
    """It would look like a leak: a context of ZeroMQ's comes with it."""
    program = f"from {__name__} import threads_after_a_large_frame as told; print(*told())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after


def test_movers_of_one_context_start_one_after_the_other(context: TransportContext) -> None:
    """Nothing of the one before is in the way, although ZeroMQ lets go of it a little later."""
    for _ in range(300):
        context.prepare_zero_copy()


@pytest.fixture
def context() -> Iterator[TransportContext]:
    with transport_context() as made:
        yield made


@pytest.fixture(params=["tcp", "ipc", "inproc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "ipc":
        return ipc_endpoint(tmp_path)
    return {"tcp": "tcp://127.0.0.1:*", "inproc": "inproc://kv"}[request.param]


@pytest.fixture
def prefill(context: TransportContext) -> Iterator[Node]:
    node = Node(context, "inproc://prefill-kv", cache=MemoryCache().fill(1))
    yield node
    node.close()


@pytest.fixture
def decode(context: TransportContext) -> Iterator[Node]:
    node = Node(context)
    yield node
    node.close()


def has_failed(node: Node, count: int) -> bool:
    return len(node.posted.of(KvSendFailed)) == count


def all_layers(node: Node, key_number: int, to: Node, number: int = 0, tokens: tuple[int, int] = (2, 11)) -> Piece:
    return piece_of(node.cache, key_between(node.self_id, to.self_id, key_number), number, layers=(0, 4), tokens=tokens)


@pytest.mark.parametrize("checksum", [False, True])
def test_pieces_arrive_in_the_right_blocks(context: TransportContext, prefill: Node, endpoint: str, checksum: bool):
    decode = Node(context, endpoint)
    sender = Node(context, "inproc://sender", cache=MemoryCache().fill(2), checksum=checksum)
    key = key_between(sender.self_id, decode.self_id)
    decode.mover.expect(key, (0, 7, 2), 2)
    sender.mover.open(decode.self_id, decode.endpoint)
    sender.mover.open(decode.self_id, decode.endpoint)
    pieces = [
        piece_of(sender.cache, key, number, layers=layers, tokens=tokens)
        for number, (layers, tokens) in enumerate([((0, 2), (2, 8)), ((2, 4), (2, 8)), ((0, 4), (8, 11))])
    ]
    for piece in pieces:
        sender.mover.send(piece, TABLE)
    wait_until(lambda: len(decode.posted.all()) == 3)
    arrived = [event.piece for event in decode.posted.of(PieceArrived) if isinstance(event, PieceArrived)]
    assert [msgspec.structs.replace(piece, checksum=None) for piece in arrived] == pieces
    assert all((piece.checksum is not None) is checksum for piece in arrived)
    assert decode.cache.read(0, 4, (0, 7, 2), 2, 11) == sender.cache.read(0, 4, TABLE, 2, 11)
    wait_until(lambda: sender.posted.all() == [PieceSent(key, number) for number in range(3)])
    decode.cache.bytes[:, decode.cache.rows((0, 7, 2), 2, 11)] = 0
    assert not decode.cache.bytes.any()
    sender.close()
    decode.close()


def test_a_piece_that_nobody_expects_touches_no_block_and_does_not_stop_the_next(prefill: Node, decode: Node):
    prefill.mover.open(decode.self_id, decode.endpoint)
    decode.mover.expect(key_between(prefill.self_id, decode.self_id, 99), TABLE)
    for number in range(3 * WINDOW.num_pieces):  # credits keep coming, or the window would be full
        prefill.mover.send(all_layers(prefill, 1, decode, number), TABLE)
    prefill.mover.send(all_layers(prefill, 99, decode), TABLE)
    wait_until(lambda: decode.posted.of(PieceArrived))
    assert decode.count("unknown") == 3 * WINDOW.num_pieces
    assert decode.cache.writes == 1


def test_forget_while_receiving_lets_no_later_byte_through(prefill: Node, decode: Node):
    """Many rounds with pieces under way all the time: after `forget` the blocks belong to others."""
    prefill.mover.open(decode.self_id, decode.endpoint)
    seen = 0
    for round_no in range(40):
        key = key_between(prefill.self_id, decode.self_id, round_no)
        decode.mover.expect(key, TABLE)
        for number in range(6):
            prefill.mover.send(all_layers(prefill, round_no, decode, number), TABLE)
        if round_no % 2:
            wait_until(lambda before=seen: decode.cache.writes > before)  # type: ignore[misc]
        decode.mover.forget(key)
        seen = decode.cache.writes
        decode.cache.bytes[:] = 0
        sent = 6 * (round_no + 1)
        wait_until(lambda sent=sent: decode.count("unknown") + decode.count("pieces") == sent)  # type: ignore[misc]
        assert not decode.cache.bytes.any()
        assert decode.cache.writes == seen


def test_a_bad_piece_is_told_and_not_written_and_can_be_sent_again(prefill: Node, decode: Node):
    key = key_between(prefill.self_id, decode.self_id)
    decode.mover.expect(key, TABLE, 4)
    prefill.mover.open(decode.self_id, decode.endpoint)
    prefill.mover.send(all_layers(prefill, 1, decode), TABLE)
    wait_until(lambda: decode.posted.of(PieceBad))
    assert not decode.cache.bytes.any()
    prefill.mover.send(all_layers(prefill, 1, decode, tokens=(4, 11)), TABLE)
    wait_until(lambda: decode.posted.of(PieceArrived))
    assert decode.cache.read(0, 4, TABLE, 4, 11) == prefill.cache.read(0, 4, TABLE, 4, 11)


class Forger:
    """A peer on the KV socket that can send anything."""

    def __init__(self, context: TransportContext, to: Node) -> None:
        self.self_id = new_incarnation()
        self.to = to
        self.link = LinkSocket(context, self.self_id, SocketOptions())
        self.link.open()
        self.link.connect(to.endpoint)

    def send(self, frames: list[bytes]) -> None:
        self.link.send(frames)
        wait_until(self.link.flush)

    def piece(self, cache: MemoryCache, data: bytes, **change: object) -> Envelope:
        key = key_between(self.self_id, self.to.self_id)
        piece = piece_of(cache, key, layers=(0, 1), tokens=(0, 1))
        return Envelope(self.self_id, self.to.self_id, msgspec.structs.replace(piece, data=data, **change))

    def send_envelope(self, envelope: Envelope) -> None:
        self.send([bytes(frame) for frame in encode(envelope, Limits())])


@pytest.fixture
def forger(context: TransportContext, decode: Node) -> Iterator[Forger]:
    made = Forger(context, decode)
    yield made
    made.link.close()


@pytest.mark.rule(25)
def test_damaged_bytes_are_found_by_the_checksum(decode: Node, forger: Forger):
    decode.mover.expect(key_between(forger.self_id, decode.self_id), TABLE)
    forger.send_envelope(forger.piece(decode.cache, b"\xff" * 8, checksum=123))
    forger.send_envelope(forger.piece(decode.cache, b"\xff" * 7, number=1))
    wait_until(lambda: len(decode.posted.all()) == 2)
    key = key_between(forger.self_id, decode.self_id)
    assert decode.posted.all() == [
        PieceBad(key, 0, "checksum"),
        PieceBad(key, 1, "7 bytes came, 8 were announced"),
    ]
    assert not decode.cache.bytes.any()
    assert decode.count("bad") == 2


@pytest.mark.rule(26)
def test_no_other_life_writes_for_a_key(prefill: Node, decode: Node, forger: Forger):
    """Neither in another's name, nor over another's connection, nor for a life that is over."""
    stranger = new_incarnation()
    key = key_between(prefill.self_id, decode.self_id)
    decode.mover.expect(key, TABLE)
    decode.mover.expect(key_between(forger.self_id, stranger), TABLE)
    right = forger.piece(decode.cache, b"\xff" * 8)
    forger.send_envelope(msgspec.structs.replace(right, message=msgspec.structs.replace(right.message, key=key)))
    forged = forger.piece(decode.cache, b"\xff" * 8, key=key)
    forger.send_envelope(Envelope(prefill.self_id, decode.self_id, forged.message))
    forger.send_envelope(Envelope(forger.self_id, stranger, right.message))
    late = forger.piece(decode.cache, b"\xff" * 8, key=key_between(forger.self_id, stranger))
    forger.send_envelope(late)
    wait_until(lambda: decode.count("foreign") == 4)
    assert not decode.cache.bytes.any()


def test_a_flood_of_garbage_is_counted_and_harms_no_transfer(prefill: Node, decode: Node, forger: Forger):
    key = key_between(prefill.self_id, decode.self_id)
    decode.mover.expect(key, TABLE)
    prefill.mover.open(decode.self_id, decode.endpoint)
    stray = Envelope(forger.self_id, decode.self_id, HelloRefused(reason="not for this socket"))
    garbage = [[b""], [b"x"] * 20, [b"\x01\x12", b"{}", b"x"], [bytes(f) for f in encode(stray, Limits())]]
    for number in range(100):
        for frames in garbage:
            forger.send(frames)
        prefill.mover.send(all_layers(prefill, 1, decode, number), TABLE)
    wait_until(lambda: len(decode.posted.of(PieceArrived)) == 100 and decode.count("malformed") == 400)
    assert not decode.posted.of(PieceBad)
    assert not prefill.posted.of(KvSendFailed)


def test_garbage_to_a_sender_is_counted_and_stray_credits_change_nothing(context: TransportContext, prefill: Node):
    receiver = NodeSocket(context, SocketOptions())
    them = new_incarnation()
    prefill.mover.open(them, receiver.bind("tcp://127.0.0.1:0"))
    piece = piece_of(prefill.cache, key_between(prefill.self_id, them), layers=(0, 4), tokens=(0, 4))
    prefill.mover.send(piece, TABLE)
    peer, _ = take_one(receiver.receive)
    for frames in ([b"x"], [b"\x01\x13", b"{}"]):
        receiver.send(peer, frames)
    wait_until(lambda: prefill.mover.counts()[0]["malformed"] == 2)
    prefill.mover.send(msgspec.structs.replace(piece, number=1), TABLE)
    take_one(receiver.receive)
    receiver.close()
    wait_until(lambda: prefill.posted.of(KvSendFailed))
    assert prefill.posted.of(KvSendFailed) == [KvSendFailed(piece.key, "the connection broke")]


def test_a_slow_peer_gets_no_more_than_its_window_and_holds_up_no_other(
    context: TransportContext, prefill: Node, decode: Node
):
    slow = Node(context)
    go_on = threading.Event()
    slow.cache.before_write = lambda: go_on.wait(DEADLINE_S)
    slow_key, fast_key = key_between(prefill.self_id, slow.self_id), key_between(prefill.self_id, decode.self_id)
    slow.mover.expect(slow_key, TABLE)
    decode.mover.expect(fast_key, TABLE)
    prefill.mover.open(slow.self_id, slow.endpoint)
    prefill.mover.open(decode.self_id, decode.endpoint)
    total = 5 * WINDOW.num_pieces
    for number in range(total):
        prefill.mover.send(all_layers(prefill, 1, slow, number), TABLE)
    for number in range(total):
        prefill.mover.send(all_layers(prefill, 1, decode, number), TABLE)
    wait_until(lambda: len(decode.posted.of(PieceArrived)) == total)
    to_slow = [event for event in prefill.posted.of(PieceSent) if event.key == slow_key]  # type: ignore[union-attr]
    assert len(to_slow) <= WINDOW.num_pieces
    go_on.set()
    wait_until(lambda: len(slow.posted.of(PieceArrived)) == total)
    slow.close()


def test_a_window_bounds_bytes_too_and_a_larger_piece_goes_alone(context: TransportContext, prefill: Node):
    one = prefill.cache.num_bytes(4, 9)
    sender = Node(
        context,
        "inproc://small",
        cache=prefill.cache,
        window=Window(num_bytes=one // 2, num_pieces=100, stall_s=DEADLINE_S),
    )
    receiver = NodeSocket(context, SocketOptions())
    them = new_incarnation()
    sender.mover.open(them, receiver.bind("tcp://127.0.0.1:0"))
    key = key_between(sender.self_id, them)
    for number in range(3):
        sender.mover.send(piece_of(sender.cache, key, number, layers=(0, 4), tokens=(2, 11)), TABLE)
    take_one(receiver.receive)
    sender.mover.stop(key_between(sender.self_id, them, 2))  # told after all three had their chance
    wait_until(lambda: sender.posted.of(PiecesStopped))
    assert len(sender.posted.of(PieceSent)) == 1  # the next waits for a credit that never comes
    receiver.close()
    wait_until(lambda: sender.posted.of(KvSendFailed))
    sender.close()


def test_stop_reads_nothing_more_and_tells_when(prefill: Node, decode: Node):
    in_read, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        in_read.set()
        assert go_on.wait(DEADLINE_S)

    prefill.cache.before_read = hold
    key, other = key_between(prefill.self_id, decode.self_id, 1), key_between(prefill.self_id, decode.self_id, 2)
    decode.mover.expect(key, TABLE)
    decode.mover.expect(other, TABLE)
    prefill.mover.open(decode.self_id, decode.endpoint)
    for number in range(3):
        prefill.mover.send(all_layers(prefill, 1, decode, number), TABLE)
    prefill.mover.send(all_layers(prefill, 2, decode), TABLE)
    assert in_read.wait(DEADLINE_S)
    prefill.mover.stop(key)
    assert not prefill.posted.of(PiecesStopped)  # the read is under way
    go_on.set()
    wait_until(lambda: prefill.posted.of(PiecesStopped))
    after = prefill.posted.all()
    wait_until(lambda: PieceSent(other, 0) in prefill.posted.all())
    later = prefill.posted.all()[len(after) :]
    assert not [event for event in later if isinstance(event, PieceSent) and event.key == key]
    prefill.mover.stop(key)
    wait_until(lambda: prefill.posted.of(PiecesStopped) == [PiecesStopped(key)] * 2)


def test_a_node_that_vanishes_fails_what_was_on_its_way(context: TransportContext, prefill: Node):
    vanishing = NodeSocket(context, SocketOptions())  # takes pieces and credits none
    them = new_incarnation()
    prefill.mover.open(them, vanishing.bind("tcp://127.0.0.1:0"))
    for request in (1, 2):
        for number in range(WINDOW.num_pieces):
            key = key_between(prefill.self_id, them, request)
            prefill.mover.send(piece_of(prefill.cache, key, number, layers=(0, 4), tokens=(0, 4)), TABLE)
    wait_until(lambda: len(prefill.posted.of(PieceSent)) == WINDOW.num_pieces)
    vanishing.close()
    wait_until(lambda: prefill.posted.of(KvSendFailed))
    assert prefill.posted.of(KvSendFailed) == [
        KvSendFailed(key_between(prefill.self_id, them, 1), "the connection broke")
    ]


def test_the_next_life_at_the_same_address_is_served_and_gets_nothing_of_the_last(
    context: TransportContext, prefill: Node
):
    first = Node(context)
    endpoint = first.endpoint
    old_key = key_between(prefill.self_id, first.self_id)
    first.mover.expect(old_key, TABLE)
    prefill.mover.open(first.self_id, endpoint)
    prefill.mover.send(all_layers(prefill, 1, first), TABLE)
    wait_until(lambda: first.posted.of(PieceArrived))
    first.close()
    second = rebind(context, endpoint)
    second.mover.expect(old_key, TABLE)  # even if it were expected: it is another life's key
    prefill.mover.send(all_layers(prefill, 1, first, 1), TABLE)
    prefill.mover.open(second.self_id, endpoint)
    second.mover.expect(key_between(prefill.self_id, second.self_id), TABLE)
    prefill.mover.send(all_layers(prefill, 1, second), TABLE)
    wait_until(lambda: second.posted.of(PieceArrived))
    assert second.cache.writes == 1
    prefill.mover.close_peer(first.self_id)
    prefill.mover.send(all_layers(prefill, 1, first, 2), TABLE)
    wait_until(lambda: KvSendFailed(old_key, "no link to this node") in prefill.posted.all())
    second.close()


def rebind(context: TransportContext, endpoint: str) -> Node:
    """A new life at an address; ZeroMQ closes the old socket a little later than it says."""
    made: list[Node] = []

    def is_bound() -> bool:
        node = Node.__new__(Node)
        try:
            node.__init__(context, endpoint)  # type: ignore[misc]
        except ConfigError:
            node.mover.close()
            return False
        made.append(node)
        return True

    wait_until(is_bound)
    return made[0]


def test_the_same_life_is_served_again_after_its_connection_broke(
    context: TransportContext, prefill: Node, tmp_path: Path
):
    self_id = new_incarnation()
    where = ipc_endpoint(tmp_path)
    node = Node(context, where, own=self_id)
    node.mover.expect(key_between(prefill.self_id, self_id), TABLE)
    prefill.mover.open(self_id, where)
    prefill.mover.send(all_layers(prefill, 1, node), TABLE)
    wait_until(lambda: node.posted.of(PieceArrived))
    node.close()
    again = Node(context, where, own=self_id)
    again.mover.expect(key_between(prefill.self_id, self_id), TABLE)
    number = 0

    def arrives() -> bool:
        nonlocal number
        number += 1
        prefill.mover.send(all_layers(prefill, 1, again, number), TABLE)
        return bool(again.posted.of(PieceArrived))

    wait_until(arrives)
    again.close()


def test_a_node_that_takes_nothing_is_given_up(context: TransportContext, prefill: Node):
    impatient = Window(num_bytes=1_000_000, num_pieces=4, stall_s=0.05)
    sender = Node(context, "inproc://impatient", cache=prefill.cache, window=impatient)
    silent = NodeSocket(context, SocketOptions())
    peers = {new_incarnation(): "tcp://127.0.0.1:1", new_incarnation(): silent.bind("inproc://silent")}
    for peer, endpoint in peers.items():
        sender.mover.open(peer, endpoint)
        sender.mover.send(
            piece_of(sender.cache, key_between(sender.self_id, peer), layers=(0, 4), tokens=(0, 4)), TABLE
        )
    wait_until(lambda: len(sender.posted.of(KvSendFailed)) == 2)
    assert {event for event in sender.posted.all() if isinstance(event, KvSendFailed)} == {
        KvSendFailed(key_between(sender.self_id, peer), "the node takes no KV") for peer in peers
    }
    silent.close()
    sender.close()


@pytest.mark.parametrize("wrong", ["nowhere", "tcp://*:1", "tcp://127.0.0.1:0"])
def test_an_endpoint_that_is_none_fails_the_pieces(prefill: Node, wrong: str):
    peer = new_incarnation()
    key = key_between(prefill.self_id, peer)
    prefill.mover.open(peer, wrong)
    prefill.mover.send(piece_of(prefill.cache, key, layers=(0, 4), tokens=(0, 4)), TABLE)
    wait_until(lambda: prefill.posted.all() == [KvSendFailed(key, "no link to this node")])


@pytest.mark.rule(38)
def test_kv_goes_with_keys_and_as_soon_as_the_other_one_is_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    keys = KeyRing(tmp_path / "keys")
    public = keys.add("late", "node")
    with closing() as stack:
        late = Node(opened(stack, keys.security("node", "late")))
        stack.callback(late.close)
        keys.forbid("late")
        sender = Node(opened(stack, keys.security("node")), cache=MemoryCache().fill(2))
        stack.callback(sender.close)
        late.mover.expect(key_between(sender.self_id, late.self_id), TABLE)
        sender.mover.open(late.self_id, late.endpoint)
        for count in (1, 2):
            sender.mover.send(all_layers(sender, 1, late), TABLE)
            wait_until(partial(has_failed, sender, count))
        assert [record.name for record in caplog.records] == ["kvferry.kv"]
        assert public.hex in caplog.records[0].getMessage()
        keys.allow("late", public)
        sender.mover.send(all_layers(sender, 1, late), TABLE)
        wait_until(lambda: late.posted.of(PieceArrived))


def test_a_piece_that_cannot_be_read_fails_its_key_alone(prefill: Node, decode: Node):
    good = key_between(prefill.self_id, decode.self_id, 2)
    decode.mover.expect(good, TABLE)
    prefill.mover.open(decode.self_id, decode.endpoint)
    wrong = msgspec.structs.replace(all_layers(prefill, 1, decode), num_bytes=5)
    prefill.mover.send(wrong, TABLE)
    prefill.mover.send(all_layers(prefill, 3, decode, tokens=(0, 100)), TABLE)
    prefill.mover.send(all_layers(prefill, 2, decode), TABLE)
    wait_until(lambda: decode.posted.of(PieceArrived))
    failed = [event for event in prefill.posted.all() if isinstance(event, KvSendFailed)]
    assert [(event.key, event.reason.split(":")[0]) for event in failed] == [
        (key_between(prefill.self_id, decode.self_id, number), "cannot be sent") for number in (1, 3)
    ]


def test_closing_a_peer_tells_that_nothing_is_read_any_more(prefill: Node):
    peer = new_incarnation()
    key = key_between(prefill.self_id, peer)
    prefill.mover.open(peer, "tcp://127.0.0.1:1")
    prefill.mover.send(piece_of(prefill.cache, key, layers=(0, 4), tokens=(0, 4)), TABLE)
    prefill.mover.close_peer(peer)
    prefill.mover.close_peer(peer)
    wait_until(lambda: prefill.posted.all() == [PiecesStopped(key)])


def test_it_need_not_have_started_to_be_closed(context: TransportContext):
    mover = ZmqKvMover(context, new_incarnation(), "tcp://*:0", MemoryCache(), Limits(), Posted())
    with pytest.raises(ConfigError, match="other hosts"):
        mover.start()
    mover.close()
    mover.close()


@pytest.mark.parametrize("timers", [Timers(), Timers(link_timeout_s=30.0), Timers(link_heartbeat_s=2.5)])
def test_the_receiver_ends_a_silent_connection_before_its_sender_does(timers: Timers):
    """A second connection beside one that lives there would end its process (ADR 0022)."""
    stall_s = window_for(timers).stall_s
    receiving = SocketOptions.kv(Limits(), 1, timers)
    sending = SocketOptions.kv(Limits(), 1, timers, stall_s=stall_s)
    ended_s = receiving.heartbeat_s + receiving.heartbeat_timeout_s
    assert min(stall_s, sending.heartbeat_timeout_s) >= ended_s + timers.link_heartbeat_s
    assert receiving.heartbeat_timeout_s == timers.link_timeout_s


def test_it_starts_once(decode: Node):
    with pytest.raises(InvariantError):
        decode.mover.start()


def test_nothing_is_left_behind(context: TransportContext):
    def live() -> None:
        prefill, decode = Node(context, cache=MemoryCache().fill(3)), Node(context)
        decode.mover.expect(key_between(prefill.self_id, decode.self_id), TABLE)
        prefill.mover.open(decode.self_id, decode.endpoint)
        prefill.mover.send(all_layers(prefill, 1, decode), TABLE)
        wait_until(lambda: decode.posted.of(PieceArrived))
        prefill.close()
        decode.close()

    live()
    gc.collect()
    with nothing_left(threads=True):
        for _ in range(5):
            live()
        assert context.open_sockets() == ()
