"""Packs the frames of a message into one frame, for messages from nodes to clients. Pure.

A client's socket has IMMEDIATE set, and libzmq 4.3.5 aborts the process when such a socket is notified of a reconnect
between two frames of one message (`fq.cpp`: `!_more`). The notification can come at every hundredth frame read, so a
message to a client must have a single frame. ADR 0025.
"""

from collections.abc import Sequence
from struct import Struct

from kvferry.common.protocol.wire import Frame

_LENGTH = Struct("<I")
OVERHEAD_BYTES = 64
"""Upper bound of what `pack` adds to the frames of any message of the protocol."""


def pack(frames: Sequence[Frame]) -> bytes:
    """One frame: each of `frames` after its length, 4 bytes little-endian."""
    parts: list[Frame] = []
    for frame in frames:
        parts += (_LENGTH.pack(memoryview(frame).nbytes), frame)
    return b"".join(parts)


def unpack(packed: Frame) -> list[Frame]:
    """The frames, as slices of `packed` (a memoryview is not copied). ValueError when it is not what `pack` makes."""
    frames: list[Frame] = []
    at = 0
    while at < len(packed):
        start = at + _LENGTH.size
        if start > len(packed):
            raise ValueError(f"{len(packed) - at} trailing bytes after {len(frames)} frames")
        at = start + int(_LENGTH.unpack(packed[at:start])[0])
        if at > len(packed):
            raise ValueError(f"frame {len(frames)}: length {at - start} bytes, only {len(packed) - start} bytes left")
        frames.append(packed[start:at])
    return frames
