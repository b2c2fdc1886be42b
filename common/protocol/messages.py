"""Every message of the control protocol, as typed plain data. No encoding (`wire.py`), no decisions, no IO.

A message is a header (JSON on the wire) plus raw frames: the fields named in `RAW_FIELDS` never pass through JSON.
Unknown header keys are ignored within a protocol version, so fields with a default may be added; a change of
meaning raises `PROTOCOL_VERSION`. Times on the wire are remaining milliseconds, never points in time. What a message
says of a request itself is one `RequestSpec`.
"""

from typing import ClassVar, Literal

import msgspec

from kvferry.common.base.ids import Incarnation, RequestId, TransferKey
from kvferry.common.base.ranges import Count, Milliseconds, Pieces, Positions, TokenId, Uint32
from kvferry.common.protocol.model_info import Compatibility, ModelInfo
from kvferry.common.protocol.request_spec import RequestSpec

PROTOCOL_VERSION = 2
"""1: first version. 2: a request's facts nest as one RequestSpec; the field's names; Commit without token_index."""

RoleName = Literal["prefill", "decode"]
ClientKind = Literal["worker", "prefill"]
FinishReason = Literal["stop", "length"]
GoneReason = Literal["never_known", "lost", "preempted"]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages. `TYPE` is the byte on the wire; it never changes its meaning."""

    TYPE: ClassVar[int] = 0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A decode node that a prefill node may hand a request to."""

    incarnation: Incarnation
    name: str
    endpoint: str
    """Control endpoint, as the worker reaches it."""


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a node publishes about how busy it is. Counts are of this instant; tokens and blocks are the units."""

    waiting_requests: Count = 0
    waiting_tokens: Count = 0
    """Prompt tokens not yet computed, queued or in progress."""
    running_requests: Count = 0
    total_blocks: Count = 0
    free_blocks: Count = 0
    """Free or evictable."""
    reserved_blocks: Count = 0
    block_size: Count = 0
    prefix_hit_tokens: Count = 0
    """Total since start."""
    prompt_tokens: Count = 0
    """Total since start."""
    preemptions: Count = 0
    """Total since start."""
    swaps: Count = 0
    """Total since start: sequences swapped to host memory because blocks ran out."""


class Announce(Message, frozen=True, kw_only=True):
    """Node -> all workers, through the proxies: this incarnation exists. Says nothing about its health."""

    TYPE: ClassVar[int] = 1
    name: str
    role: RoleName | Literal["colocated"]
    """What it was started as; `colocated` has both roles. Welcome.roles is authoritative."""
    model: str
    endpoint: str


class Hello(Message, frozen=True, kw_only=True):
    """Client -> node, first on every connection. `compatibility` is None for a worker: it moves no KV."""

    TYPE: ClassVar[int] = 2
    kind: ClientKind
    name: str
    protocol_version: Count = PROTOCOL_VERSION
    compatibility: Compatibility | None = None


class Welcome(Message, frozen=True, kw_only=True):
    """Node -> client: who this is and what it serves. Nothing else passes before it."""

    TYPE: ClassVar[int] = 3
    name: str
    roles: tuple[RoleName, ...]
    model: ModelInfo
    compatibility: Compatibility
    kv_endpoints: tuple[str, ...] = ()
    """One per tensor-parallel rank; empty where no KV is received."""
    transports: tuple[str, ...] = ()
    """How KV may come, best first."""
    staging: tuple[str, ...] = ()
    """Where the staging slots of each rank are, for one-sided transports; empty without any."""


class HelloRefused(Message, frozen=True, kw_only=True):
    """Node -> client: no link, and the field that differs."""

    TYPE: ClassVar[int] = 4
    reason: str


class WrongIncarnation(Message, frozen=True, kw_only=True):
    """Node -> client: your `to` names another incarnation; the sender of this is the one that runs here now."""

    TYPE: ClassVar[int] = 5


class WantedRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One request that a client wants on a node."""

    request_id: RequestId
    attempt: Count
    next_index: Positions
    """First output index that the worker lacks (0 for a prefill client)."""
    expected: bool
    """The client expects the node to have it: answered with its state."""
    resend: bool = False
    """The worker saw a gap: send the tokens from next_index on again."""
    generation: Count = 0
    """Prefill clients only: which Reserve of the attempt."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Client -> node, every `heartbeat_s`: the set of all that the client wants there. The node frees what is not in
    it and not newer than it."""

    TYPE: ClassVar[int] = 6
    heartbeat_no: Count
    as_of: Count
    """Highest placement_no (workers) or transfer_no (prefill nodes) given out when the set was made."""
    wanted: tuple[WantedRequest, ...] = ()
    last: bool = False
    """The client exits in order; nothing comes after this."""


class Status(Message, frozen=True, kw_only=True):
    """Node -> client, every `heartbeat_s`: alive, how far, how busy."""

    TYPE: ClassVar[int] = 7
    status_no: Count
    draining: bool = False
    steps_done: Count = 0
    step_age_ms: Milliseconds = 0
    """Age of the step in progress; 0 when none is."""
    work_waiting: bool = False
    load: NodeLoad = NodeLoad()
    link_seq: Count = 0
    """Number of the last Tokens message sent to this client: shows that the last one was lost."""
    progress_no: Count = 0
    """Changes while a long step makes progress."""


class Job(Message, frozen=True, kw_only=True):
    """Worker -> prefill node: compute this prompt and hand it over to one of the candidates."""

    TYPE: ClassVar[int] = 8
    request_id: RequestId
    attempt: Count
    placement_no: Count
    spec: RequestSpec
    remaining_ms: Milliseconds
    waited_ms: Milliseconds
    """Since the router accepted the request: keeps its place in queues over all attempts."""
    candidates: tuple[Candidate, ...]
    """Best first, at most three. Empty: finish it where it is."""


class Cancel(Message, frozen=True, kw_only=True):
    """Worker -> node: drop all attempts up to this one."""

    TYPE: ClassVar[int] = 9
    request_id: RequestId
    attempt: Count
    reason: str = ""


class Gone(Message, frozen=True, kw_only=True):
    """Node -> worker: this node holds nothing for this attempt."""

    TYPE: ClassVar[int] = 10
    request_id: RequestId
    attempt: Count
    reason: GoneReason
    detail: str = ""


class FirstToken(Message, frozen=True, kw_only=True):
    """Prefill -> worker: an early copy of the token that the decode node's stream will start with."""

    TYPE: ClassVar[int] = 11
    request_id: RequestId
    attempt: Count
    index: Positions
    token_id: TokenId
    finish: FinishReason | None = None
    cached_tokens: Positions = 0
    """Prompt tokens whose KV the prefix cache had."""


class HandedOver(Message, frozen=True, kw_only=True):
    """Prefill -> worker: the decode node owns the request now."""

    TYPE: ClassVar[int] = 12
    request_id: RequestId
    attempt: Count
    decode: Incarnation


class HandoverFailed(Message, frozen=True, kw_only=True):
    """Prefill -> worker: this attempt has ended here without a hand-over."""

    TYPE: ClassVar[int] = 13
    request_id: RequestId
    attempt: Count
    reason: str
    """no_room, draining, deadline, generation, lost, overloaded, ..."""
    retained: bool = False
    """The node retains the computed KV for a while, for a next attempt there."""
    commit_sent: bool = False
    decode: Incarnation | None = None
    """The decode node that the hand-over failed with."""
    retryable: bool = True
    detail: str = ""


class Reserve(Message, frozen=True, kw_only=True):
    """Prefill -> decode: reserve blocks for this request. Carries all that decoding needs besides the KV."""

    TYPE: ClassVar[int] = 14
    key: TransferKey
    transfer_no: Count
    placement_no: Count
    worker: Incarnation
    spec: RequestSpec
    remaining_ms: Milliseconds
    waited_ms: Milliseconds
    staged: bool = False
    """The sender can write into the receiver's staging slots."""


class Granted(Message, frozen=True, kw_only=True):
    """Decode -> prefill: blocks are reserved; send KV from `first_token` on."""

    TYPE: ClassVar[int] = 15
    key: TransferKey
    first_token: Positions
    """Position; a multiple of the block size. Everything below is pinned from the decode node's prefix cache."""
    slots: tuple[int, ...] = ()
    """Staging slots that may be written for this key; none: the bytes come in the pieces."""


class Queued(Message, frozen=True, kw_only=True):
    """Decode -> prefill: no room now; the reservation waits in a queue, and an answer follows."""

    TYPE: ClassVar[int] = 16
    key: TransferKey


class Refused(Message, frozen=True, kw_only=True):
    """Decode -> prefill: this node does not take the request."""

    TYPE: ClassVar[int] = 17
    key: TransferKey
    reason: str
    """full, draining, no_worker_link, gone, ..."""


class Piece(Message, frozen=True, kw_only=True):
    """Prefill -> decode on the KV link: cache of some layers and positions, in canonical order."""

    TYPE: ClassVar[int] = 18
    key: TransferKey
    number: Pieces
    layer_start: Count
    layer_end: Count
    """Exclusive."""
    token_start: Positions
    token_end: Positions
    """Exclusive."""
    num_bytes: Count
    checksum: Uint32 | None = None
    """CRC-32 of the bytes."""
    slot: int | None = None
    """The bytes were written into this staging slot of the receiver, and `data` is empty."""
    data: bytes | memoryview = b""
    """Raw frame: [layer, cache tensor, token, per-token shape] contiguous."""


class Credit(Message, frozen=True, kw_only=True):
    """Decode -> prefill on the KV link: one piece was written or dropped, another may come.

    `slot` is the piece's number: its bytes no longer count against the sender's window for this peer, and the staging
    slot that it named, if any, may be written again.
    """

    TYPE: ClassVar[int] = 19
    key: TransferKey
    slot: Count


class Commit(Message, frozen=True, kw_only=True):
    """Prefill -> decode: you own the request once all pieces have arrived. Repeated until answered."""

    TYPE: ClassVar[int] = 20
    key: TransferKey
    num_pieces: Pieces
    first_token_pos: Positions
    """First position carried (what Granted asked for)."""
    num_tokens: Positions
    """Positions 0 .. num_tokens - 1 have KV; the token below has none yet."""
    token_id: TokenId
    """The token at position num_tokens, from which decoding continues."""
    cached_tokens: Positions = 0
    waiting: tuple[Pieces, ...] = ()
    """In a repeated Commit after Committed: pieces that the receiver lacks and that still wait to be sent."""


class Committed(Message, frozen=True, kw_only=True):
    """Decode -> prefill: owned (not necessarily running yet)."""

    TYPE: ClassVar[int] = 21
    key: TransferKey
    complete: bool = True
    """Every piece arrived undamaged: the sender may release its blocks."""
    missing: tuple[Pieces, ...] = ()
    """Numbers of pieces to send again."""


class CommitRefused(Message, frozen=True, kw_only=True):
    """Decode -> prefill: this node does not own the request and never will under this key."""

    TYPE: ClassVar[int] = 22
    key: TransferKey
    reason: str


class Abort(Message, frozen=True, kw_only=True):
    """Prefill -> decode: release the reservation. Never touches a committed request."""

    TYPE: ClassVar[int] = 23
    key: TransferKey
    stopped: bool = True
    """No write for this key is in progress or will come."""


class Revoke(Message, frozen=True, kw_only=True):
    """Decode -> prefill: the grant is revoked; answered by Abort."""

    TYPE: ClassVar[int] = 24
    key: TransferKey
    reason: str


class TokensEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """New tokens of one request."""

    request_id: RequestId
    attempt: Count
    first_index: Positions
    token_ids: tuple[TokenId, ...]
    finish: FinishReason | None = None
    error: str | None = None
    """Set when generation failed; ends the request with 424."""
    cached_tokens: Positions = 0


class Tokens(Message, frozen=True, kw_only=True):
    """Node -> worker: one message a step, with the new tokens of all the worker's requests there."""

    TYPE: ClassVar[int] = 25
    link_seq: Count
    entries: tuple[TokensEntry, ...]


RAW_FIELDS: dict[type[msgspec.Struct], tuple[str, ...]] = {
    RequestSpec: ("prompt_token_ids", "output_token_ids"),
    Piece: ("data",),
}
"""Fields that travel as raw frames after the header, in this order."""

NESTED_SPEC: dict[type[Message], str] = {Job: "spec", Reserve: "spec"}
"""Messages whose raw frames are those of a nested RequestSpec, and its field."""

MESSAGE_TYPES: dict[int, type[Message]] = {
    cls.TYPE: cls
    for cls in (
        Announce, Hello, Welcome, HelloRefused, WrongIncarnation, Heartbeat, Status, Job, Cancel, Gone, FirstToken,
        HandedOver, HandoverFailed, Reserve, Granted, Queued, Refused, Piece, Credit, Commit, Committed, CommitRefused,
        Abort, Revoke, Tokens,
    )
}  # fmt: skip


CLIENT_SPEAKS = (Hello, Heartbeat, Job, Cancel, Reserve, Commit, Abort)
"""What the client of a link sends; everything else its node sends. Two nodes with both roles are clients of each other,
so the peer alone does not show which way a message goes."""


class Envelope(msgspec.Struct, frozen=True):
    """A message with the two incarnations it concerns. `receiver` is empty where it is not known yet (Hello)."""

    sender: Incarnation
    receiver: Incarnation
    message: Message
