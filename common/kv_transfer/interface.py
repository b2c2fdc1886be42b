"""The interface of KV movers and KV transports. Types only.

The state machines of the hand-over decide what is sent, expected and stopped. A mover transfers the bytes and reports
the outcome by events of `common.cluster.events`, which it posts from its own threads. KvFailed is the last event of a
thread that an exception ended. No call here waits for a peer.

A transport carries the bytes of pieces. A two-sided one (`zmq`) sends them in the Piece message, and the receiver
checks each piece before it writes any block. A one-sided one writes into staging slots of the receiver, never into
blocks: Granted assigns the slots, the Piece message names the slot that was written, and the receiver copies from it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.common.base.clock import Clock
from kvferry.common.base.ids import Incarnation, TransferKey
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
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.kv_transfer.staging import NoSlotMemory, NoSlotWriter, SlotMemory, SlotWriter
from kvferry.common.protocol.messages import Piece

KvEvent = PieceSent | PiecesStopped | KvSendFailed | PieceArrived | PieceBad | SessionClosed | KvFailed
Post = Callable[[KvEvent], None]
"""Passes an event to the control thread. Called from any thread; must neither block nor raise."""


@dataclass(frozen=True, slots=True)
class KvTransport:
    """One way to carry the bytes of pieces. Each module of a transport declares one as TRANSPORT.

    The defaults are those of a transport without staging slots.
    """

    name: str
    """As in node.kv_transports."""
    is_one_sided: bool = False
    """Whether it writes into staging slots; it then sets the fields below."""
    is_usable: Callable[[NodeSettings], bool] = lambda settings: True
    """Whether this node can use it, by its platform, device or settings."""
    staging_host: Callable[[], str] = lambda: ""
    """Prefix of the staging addresses that this process can write to: a peer with another one is out of reach."""
    make_memory: Callable[[int, int], SlotMemory] = lambda num_slots, slot_bytes: NoSlotMemory()
    """(num_slots, slot_bytes) -> the receiver's end."""
    make_writer: Callable[[Incarnation], SlotWriter] = lambda self_id: NoSlotWriter()
    """(this process's incarnation) -> the sender's end."""


@dataclass(frozen=True, slots=True)
class KvEnd:
    """Shared by the sending and the receiving half of a mover."""

    self_id: Incarnation
    limits: Limits
    clock: Clock
    post: Post


class BlockBytes(Protocol):
    """The KV cache as bytes in wire order: [layer, component, token, per-token shape]."""

    def read(
        self, layer_start: int, layer_end: int, block_table: Sequence[int], token_start: int, token_end: int
    ) -> memoryview:
        """Copy these layers and tokens; later writes to the blocks do not change the copy."""
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
        """Write into the blocks. Raises ValueError, writing nothing, when the range or the length does not fit."""
        ...


class KvMover(Protocol):
    """Transfers pieces to and from the caches of other incarnations. Called from the node's control thread only."""

    def start(self) -> str:
        """Bind and start; returns the endpoint for peers. Raises ConfigError when it cannot be bound."""
        ...

    def open(self, peer: Incarnation, *endpoints: str, staging: str = "") -> None:
        """Prepare to send to an incarnation: one endpoint per rank; `staging`: the address of its staging slots."""
        ...

    def close_peer(self, peer: Incarnation) -> None:
        """Send nothing more to this incarnation. Posts PiecesStopped for every key with pieces waiting."""
        ...

    def send(self, piece: Piece, block_table: tuple[int, ...], slots: tuple[int, ...] = ()) -> None:
        """Read the piece's blocks and send them to `piece.key.decode`. `piece` has no data yet.

        The bytes go through one of `slots` if it is reachable and large enough, otherwise in the message.

        Posts PieceSent when the blocks have been read and the bytes are in flight, or KvSendFailed. KvSendFailed may
        also follow later, if pieces of the key that were sent may not have arrived.
        """
        ...

    def stop(self, key: TransferKey) -> None:
        """Stop reading for this key. Posts PiecesStopped once, when no read follows. With a one-sided transport that is
        when no write is in progress or can start, which may take until the session is closed."""
        ...

    def expect(
        self, key: TransferKey, block_table: tuple[int, ...], first_token: int = 0, slots: tuple[int, ...] = ()
    ) -> None:
        """Accept pieces of this key at positions >= `first_token`; the blocks below hold shared KV and must not be
        written. A piece may name one of `slots`. Posts PieceArrived or PieceBad for each piece."""
        ...

    def forget(self, key: TransferKey) -> None:
        """Accept no more pieces of this key. Waits for a write in progress: after it returns, nothing is written to
        the key's blocks."""
        ...

    def close_session(self, peer: Incarnation) -> None:
        """Prevent new writes of this incarnation into the staging slots here. Posts SessionClosed if that succeeded."""
        ...

    @property
    def staging_address(self) -> str:
        """Address of the staging slots here, for peers; "" without any, and before `start`."""
        ...

    def close(self) -> None:
        """End all threads and release everything. Posts nothing afterwards. Allowed without `start`."""
        ...
