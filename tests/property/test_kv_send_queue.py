"""SendQueue against a simple model, under random calls."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.kv_transfer.send_queue import OutboundPiece, SendQueue, Window
from kvferry.common.protocol.messages import Piece
from tests.support.kv_memory import key_between

SELF_ID = Incarnation("a1" * 16)
PEERS = [Incarnation(f"{number:032x}") for number in range(1, 4)]
WINDOW = Window(num_bytes=100, num_pieces=3, stall_s=5.0)
peers = st.sampled_from(PEERS)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = SendQueue(WINDOW)
        self.now = 0.0
        self.number = 0
        self.pending: dict[Incarnation, list[Piece]] = {}
        self.in_flight: dict[Incarnation, list[Piece]] = {}
        self.blocked: set[Incarnation] = set()

    def keys(self, peer: Incarnation) -> set[TransferKey]:
        return {piece.key for piece in self.pending.get(peer, []) + self.in_flight.get(peer, [])}

    def can_send(self, peer: Incarnation) -> bool:
        in_flight = self.in_flight[peer]
        if not self.pending[peer] or peer in self.blocked:
            return False
        size = sum(piece.num_bytes for piece in in_flight) + self.pending[peer][0].num_bytes
        return not in_flight or (size <= WINDOW.num_bytes and len(in_flight) < WINDOW.num_pieces)

    @rule(peer=peers)
    def open_or_close(self, peer: Incarnation) -> None:
        if peer in self.pending:
            assert self.queue.close(peer) == self.keys(peer)
            del self.pending[peer], self.in_flight[peer]
            self.blocked.discard(peer)
        else:
            self.queue.open(peer)
            self.pending[peer], self.in_flight[peer] = [], []

    @rule(peer=peers, request=st.integers(0, 2), num_bytes=st.integers(1, 150))
    def add(self, peer: Incarnation, request: int, num_bytes: int) -> None:
        if peer not in self.pending:
            self.queue.open(peer)
            self.pending[peer], self.in_flight[peer] = [], []
        self.number += 1
        piece = Piece(
            key=key_between(SELF_ID, peer, request),
            number=self.number,
            layer_start=0,
            layer_end=1,
            token_start=0,
            token_end=1,
            num_bytes=num_bytes,
        )
        self.queue.add(OutboundPiece(piece, ()), self.now)
        self.pending[peer].append(piece)

    @rule(is_sent=st.booleans())
    def send(self, is_sent: bool) -> None:
        ready = [peer for peer in self.pending if self.can_send(peer)]
        outgoing = self.queue.next()
        assert (outgoing is None) == (not ready)
        if outgoing is None:
            return
        peer = outgoing.piece.key.decode
        assert outgoing.piece == self.pending[peer][0]
        if is_sent:
            self.queue.sent(outgoing, self.now)
            self.in_flight[peer].append(self.pending[peer].pop(0))
        else:
            self.queue.block(peer)
            self.blocked.add(peer)

    @rule()
    def round_robin_serves_every_ready_peer(self) -> None:
        """With as many calls as ready peers, each of them is served once."""
        ready = {peer for peer in self.pending if self.can_send(peer)}
        served = []
        for _ in ready:
            outgoing = self.queue.next()
            assert outgoing is not None
            served.append(outgoing.piece.key.decode)
        assert set(served) == ready

    @rule(peer=peers)
    def unblock(self, peer: Incarnation) -> None:
        assert self.queue.unblock(peer) is (peer in self.blocked)
        self.blocked.discard(peer)

    @precondition(lambda self: any(self.in_flight.values()))
    @rule(data=st.data())
    def credit(self, data: st.DataObject) -> None:
        in_flight = [(peer, piece) for peer, pieces in self.in_flight.items() for piece in pieces]
        peer, piece = data.draw(st.sampled_from(in_flight))
        self.queue.credited(peer, piece.key, piece.number, self.now)
        self.in_flight[peer].remove(piece)

    @rule(peer=peers, number=st.integers(1000, 1002))
    def stray_credit(self, peer: Incarnation, number: int) -> None:
        self.queue.credited(peer, key_between(SELF_ID, peer, 1), number, self.now)

    @rule(peer=peers, request=st.integers(0, 2))
    def stop(self, peer: Incarnation, request: int) -> None:
        key = key_between(SELF_ID, peer, request)
        self.queue.stop(key)
        self.pending = {peer: [piece for piece in pieces if piece.key != key] for peer, pieces in self.pending.items()}

    @rule(peer=peers)
    def lose(self, peer: Incarnation) -> None:
        keys = {piece.key for piece in self.in_flight.get(peer, [])}
        assert self.queue.lost(peer) == keys
        if peer in self.pending:
            self.in_flight[peer] = []
            self.pending[peer] = [piece for piece in self.pending[peer] if piece.key not in keys]

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        waiting = {
            peer for peer in self.pending if self.in_flight[peer] or (peer in self.blocked and self.pending[peer])
        }
        assert set(self.queue.stalled(self.now)) <= waiting
        assert set(self.queue.stalled(self.now + 2 * WINDOW.stall_s)) == waiting
        deadline = self.queue.next_deadline()
        assert (deadline is None) == (not waiting)
        if deadline is not None:
            assert self.queue.stalled(max(deadline, self.now))
            assert bool(self.queue.stalled(self.now)) is (deadline <= self.now)

    @invariant()
    def agrees(self) -> None:
        self.queue.check_invariants()
        assert self.queue.num_pending == sum(map(len, self.pending.values()))
        assert self.queue.num_in_flight == sum(map(len, self.in_flight.values()))


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=100, stateful_step_count=40)
