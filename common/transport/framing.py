"""Several frames as one, for what nodes say to clients. Does no IO.

A client's socket has IMMEDIATE, and libzmq 4.3.5 ends the process when such a socket hears, between two frames of one
message, that its connection is made anew (`fq.cpp`: `!_more`). It may hear at every hundredth frame that is read, so no
message to it may have more than one. ADR 0025.
"""

from collections.abc import Sequence
from struct import Struct

from kvferry.common.protocol.wire import Frame

_LENGTH = Struct("<I")
OVERHEAD_BYTES = 64
"""More than what is added to the frames of any message of the protocol."""


def pack(frames: Sequence[Frame]) -> bytes:
    """Each frame behind its length, little-endian in 4 bytes."""
    parts: list[Frame] = []
    for frame in frames:
        parts += (_LENGTH.pack(memoryview(frame).nbytes), frame)
    return b"".join(parts)


def unpack(parcel: Frame) -> list[Frame]:
    """The frames, of the parcel's own kind; those of a memoryview keep its memory. ValueError for anything else."""
    frames: list[Frame] = []
    at = 0
    while at < len(parcel):
        start = at + _LENGTH.size
        if start > len(parcel):
            raise ValueError(f"{len(parcel) - at} bytes after {len(frames)} frames")
        at = start + int(_LENGTH.unpack(parcel[at:start])[0])
        if at > len(parcel):
            raise ValueError(f"frame {len(frames)} of {at - start} bytes, {len(parcel) - start} are there")
        frames.append(parcel[start:at])
    return frames
