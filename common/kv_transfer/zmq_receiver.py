"""The receiving half of the mover: one bound socket; each piece is validated, written and credited.

Runs on the KV thread. Invalid input of a peer never raises: it is dropped and counted.
"""

from collections import Counter

import msgspec

from kvferry.common.base.errors import ProtocolError
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.events import PieceArrived, PieceBad
from kvferry.common.kv_transfer.expectations import Expectations, Verdict
from kvferry.common.kv_transfer.interface import KvEnd
from kvferry.common.kv_transfer.staging import SlotMemory
from kvferry.common.protocol.messages import Credit, Envelope, Piece
from kvferry.common.protocol.wire import Frame, decode, encode
from kvferry.common.transport.node_socket import NodeSocket

MAX_RECEIVED = 8
"""Pieces per `receive`, so that sending is not delayed."""


class ZmqReceiver:
    """Receives pieces from `socket`, which the caller owns."""

    def __init__(self, end: KvEnd, socket: NodeSocket, expectations: Expectations, memory: SlotMemory) -> None:
        self._end = end
        self._socket = socket
        self._expectations = expectations
        self._memory = memory
        self.counts: Counter[str] = Counter()
        """`pieces`, `bytes` (written); `staged` (by a slot); `unknown`, `bad`, `foreign`, `malformed` (dropped)."""

    def receive(self) -> None:
        """Process up to MAX_RECEIVED pieces that have arrived."""
        for peer, frames in self._socket.receive(MAX_RECEIVED):
            piece = self._checked(peer, frames)
            if piece is not None:
                self._process(piece)
                self._credit(piece)

    def _checked(self, peer: Incarnation, frames: list[Frame]) -> Piece | None:
        try:
            envelope = decode(frames, self._end.limits)
        except ProtocolError:
            self.counts["malformed"] += 1
            return None
        piece = envelope.message
        if not isinstance(piece, Piece):
            self.counts["malformed"] += 1
            return None
        # Both ends of the key must be those of the connection: another incarnation must not write for a key, and a
        # piece for another incarnation must not be written.
        if not (
            envelope.sender == peer == piece.key.prefill and envelope.receiver == self._end.self_id == piece.key.decode
        ):
            self.counts["foreign"] += 1
            return None
        return piece

    def _process(self, piece: Piece) -> None:
        verdict, why = self._write(piece)
        if verdict is Verdict.WRITTEN:
            self.counts["pieces"] += 1
            self.counts["bytes"] += piece.num_bytes
            self.counts["staged"] += piece.slot is not None
            self._end.post(PieceArrived(msgspec.structs.replace(piece, data=b"")))
        elif verdict is Verdict.BAD:
            self.counts["bad"] += 1
            self._end.post(PieceBad(piece.key, piece.number, why))
        else:
            self.counts["unknown"] += 1

    def _write(self, piece: Piece) -> tuple[Verdict, str]:
        if piece.slot is None:
            return self._expectations.write(piece, piece.data)
        try:
            with self._memory.view(piece.slot, piece.num_bytes) as data:
                return self._expectations.write(piece, data)
        except ValueError as error:
            return Verdict.BAD, str(error)

    def _credit(self, piece: Piece) -> None:
        """Send a Credit, also for a dropped piece: it has left the sender's window."""
        credit = Envelope(self._end.self_id, piece.key.prefill, Credit(key=piece.key, slot=piece.number))
        self._socket.send(piece.key.prefill, encode(credit, self._end.limits))
