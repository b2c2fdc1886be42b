"""Identities: request ids, process incarnations, transfer keys. Draws randomness; does no other IO."""

import os
from typing import Annotated, NamedTuple, NewType

import msgspec

from kvferry.common.base.ranges import Count

RequestId = NewType("RequestId", str)
"""32 hex digits, made by the router worker. A client's own `id` is echoed, never used as a key."""

Incarnation = NewType("Incarnation", Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")])
"""32 hex digits, drawn once per process life, after the fork. As 16 bytes it is also the ZeroMQ routing id.

The pattern is checked where a message is decoded: what comes from a peer always has a routing id.
"""


def new_request_id() -> RequestId:
    """A fresh 128-bit request id."""
    return RequestId(os.urandom(16).hex())


def new_incarnation() -> Incarnation:
    """A fresh incarnation. Its first byte is never zero: ZeroMQ keeps such routing ids for itself."""
    first = os.urandom(1)[0] or 1
    return Incarnation((bytes([first]) + os.urandom(15)).hex())


def routing_id(incarnation: Incarnation) -> bytes:
    """The 16 bytes that ZeroMQ knows this process life by."""
    return bytes.fromhex(incarnation)


class TransferKey(NamedTuple):
    """Names one hand-over of one generation between two process lives; nothing else may write for it."""

    request_id: RequestId
    attempt: Count
    generation: Count
    prefill: Incarnation
    decode: Incarnation


class AttemptKey(NamedTuple):
    """One plan of one request: what a node holds is held for exactly one of these."""

    request_id: RequestId
    attempt: int
