"""Messages that wait because a peer is full. Pure: knows no socket."""

from collections import deque
from collections.abc import Sequence
from enum import Enum

from kvferry.common.errors import InvariantError
from kvferry.common.protocol.wire import Frame


class SendResult(Enum):
    """What became of a message that was given to a socket. None of them promises that it arrives."""

    SENT = "sent"
    """ZeroMQ has it."""
    QUEUED = "queued"
    """The peer has no room (or is not connected yet): it waits here, and `flush` tries again."""
    UNREACHABLE = "unreachable"
    """There is no such peer, or its outbox overflowed: dropped, the link counts as down."""


class Outbox:
    """A bounded queue of messages for one peer, in order."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, Sequence[Frame]]] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames that wait."""
        return self._num_bytes

    def put(self, frames: Sequence[Frame]) -> bool:
        """Append a message; False, and nothing changes, when a bound would be passed."""
        size = sum(map(len, frames))
        if len(self._waiting) >= self._max_messages or self._num_bytes + size > self._max_bytes:
            return False
        self._waiting.append((size, frames))
        self._num_bytes += size
        return True

    def first(self) -> Sequence[Frame]:
        """The message that is sent next; IndexError when there is none."""
        return self._waiting[0][1]

    def pop(self) -> None:
        """Take the first away: it was sent."""
        size, _ = self._waiting.popleft()
        self._num_bytes -= size

    def clear(self) -> int:
        """Drop all; how many there were."""
        dropped = len(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return dropped

    def check_invariants(self) -> None:
        """The byte count is that of the messages, and both bounds hold."""
        if self._num_bytes != sum(size for size, _ in self._waiting):
            raise InvariantError(f"outbox: {self._num_bytes} bytes booked for messages of another size")
        if len(self._waiting) > self._max_messages or self._num_bytes > self._max_bytes:
            raise InvariantError("outbox: a bound is passed")
