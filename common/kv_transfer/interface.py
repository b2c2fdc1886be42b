"""What a mover of KV bytes is, whatever carries them. Types only.

The hand-over's state machine decides what is sent, expected and given up; a mover only moves bytes and says what became
of them, by events of `common.state.events` that it posts from threads of its own. KvFailed is the last event of a
thread that an exception ended. No call here waits for a peer.

Two kinds fit behind it. A two-sided one (`zmq`) checks each piece where it arrives, before any block is touched. A
one-sided one writes into staging slots of the receiver, never into blocks; Granted says which are whose, a Piece names
the one that was written, and the receiver copies from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.common.base.clock import Clock
from kvferry.common.base.ids import (
    Incarnation,
    TransferKey,
)
from kvferry.common.cluster.events import (
    KvFailed,
    KvSendFailed,
    PieceArrived,
    PieceBad,
    PieceSent,
    PiecesStopped,
    SessionClosed,
)
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import Piece

KvEvent = PieceSent | PiecesStopped | KvSendFailed | PieceArrived | PieceBad | SessionClosed | KvFailed
Post = Callable[[KvEvent], None]
"""Takes an event over to the control thread. Called from any thread; neither waits nor raises."""


@dataclass(frozen=True, slots=True)
class KvEnd:
    """What one end of the transfers is given of its process."""

    own: Incarnation
    limits: Limits
    clock: Clock
    post: Post


class BlockBytes(Protocol):
    """The KV cache as bytes in the wire's order: [layer, cache tensor, token, per-token shape]."""

    def read(
        self, layer_start: int, layer_end: int, block_table: Sequence[int], token_start: int, token_end: int
    ) -> memoryview:
        """A copy of these layers and tokens: what is written to the blocks later does not show in it."""
        ...

    def write(
        self,
        layer_start: int,
        layer_end: int,
        block_table: Sequence[int],
        token_start: int,
        token_end: int,
        data: bytes | bytearray | memoryview,
    ) -> None:
        """Put them into the blocks. ValueError when the range or the length does not fit; then nothing is written."""
        ...


class KvMover(Protocol):
    """Moves pieces between the caches of two process lives, both ways. Called from one thread, the node's control."""

    def start(self) -> str:
        """Bind and begin; returns the endpoint that others send to. ConfigError when it cannot be bound."""
        ...

    def open(self, peer: Incarnation, *endpoints: str, staging: str = "") -> None:
        """Make ready to send to this life, which has an endpoint for each of its ranks, and staging slots where
        `staging` says."""
        ...

    def close_peer(self, peer: Incarnation) -> None:
        """Nothing goes to this life any more. Posts PiecesStopped for every key that had pieces waiting."""
        ...

    def send(self, piece: Piece, block_table: tuple[int, ...], slots: tuple[int, ...] = ()) -> None:
        """Read the piece's blocks and send them to `piece.key.decode`. `piece` has no data yet.

        One of `slots` may carry the bytes, if one can be reached and is large enough; else they go in the message.

        Posts PieceSent when the blocks have been read and the bytes are on their way, or KvSendFailed; the latter also
        later, when it shows that sent pieces of the key may not have arrived.
        """
        ...

    def stop(self, key: TransferKey) -> None:
        """Read nothing more for this key. Posts PiecesStopped, once, when that is so; a one-sided mover posts it only
        when no write is under way or can come, which may take until the session is closed."""
        ...

    def expect(
        self, key: TransferKey, block_table: tuple[int, ...], first_token: int = 0, slots: tuple[int, ...] = ()
    ) -> None:
        """Let pieces of this key be written at positions from `first_token` on. Posts PieceArrived or PieceBad for
        each. The blocks below hold shared KV, and no piece may touch them. A piece may name one of `slots`."""
        ...

    def forget(self, key: TransferKey) -> None:
        """When it returns, nothing is written to this key's blocks any more; waits for a write under way."""
        ...

    def close_session(self, peer: Incarnation) -> None:
        """Let this life begin no more writes into staging slots here. Posts SessionClosed if that is so."""
        ...

    @property
    def staging_address(self) -> str:
        """Where others find the staging slots here; "" without any, and before `start`."""
        ...

    def close(self) -> None:
        """End all threads and close everything. Nothing is posted afterwards. Also right before or without `start`."""
        ...
