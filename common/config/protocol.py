"""Timers and limits of the control protocol. The defaults are the protocol's own; units are in the names.

Read by the pure cores, filled from [timers] and [limits] of the cluster file. Plain data; no IO.
"""

import msgspec


class Timers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Intervals and timeouts of the control protocol."""

    heartbeat_s: float = 0.5
    """Interval of a client's heartbeats, a node's Status messages and its announcements."""
    suspect_s: float = 1.5
    """A node that is silent for this long gets no new work."""
    dead_after_s: float = 2.5
    """A node that is silent for this long counts as dead."""
    client_timeout_s: float = 3.0
    """A node releases everything it holds for a client that is silent for this long."""
    worker_timeout_s: float = 2.0
    """A decode node refuses reservations for a router worker that it has not heard from for this long."""
    late_tick_s: float = 0.5
    """A process whose own timer fires this late was suspended or overloaded: it first reads its waiting messages, and
    adds at most one heartbeat interval to each peer's silence."""
    engine_stall_s: float = 10.0
    """A node counts as dead when it has work and its engine finishes no step for this long, nor a layer of a long
    step."""
    engine_stall_exit_s: float = 30.0
    """A node whose engine stalls for this long exits, so that it can be restarted."""
    reserve_timeout_s: float = 1.0
    """A decode node that does not answer a Reserve for this long is passed over for the next candidate."""
    queued_wait_s: float = 5.0
    """A reservation that a decode node has queued for this long is tried at the next candidate. Without another
    candidate it keeps its place in the queue for as long again."""
    grant_idle_timeout_s: float = 5.0
    """While other reservations wait for room, a decode node revokes a granted one that receives no KV for this long."""
    retransmit_s: float = 0.5
    """Interval at which an unanswered Reserve or Commit is sent again."""
    commit_timeout_s: float = 5.0
    """A hand-over fails when its Commit is unanswered for this long."""
    piece_idle_timeout_s: float = 5.0
    """When a committed request receives no KV for this long, its missing pieces are requested once more; after the
    same time again the request is lost."""
    quarantine_s: float = 6.0
    """How long the staging slots of a prefill node that is gone stay unused, because a write of it may still complete:
    the transport's write timeout plus 1 s."""
    retain_s: float = 10.0
    """How long a prefill node retains computed KV after a failed hand-over."""
    paused_reservation_s: float = 2.0
    """A prompt that higher-priority prompts have paused for this long releases its decode reservation."""
    swap_wait_s: float = 2.0
    """A request swapped out to host memory is preempted when the device has no room for it for this long."""
    aging_s: float = 10.0
    """A waiting request's priority rises by one class each time it has waited this long."""
    pair_penalty_s: float = 10.0
    """How long the router avoids a (prefill, decode) pair after a failed hand-over between them."""
    retry_jitter_s: float = 0.1
    """Requests of a dead node are placed again after a random delay of at most this."""
    backoff_min_s: float = 0.1
    """First delay before a refused or preempted request is tried again; it doubles each time."""
    backoff_max_s: float = 2.0
    """Longest such delay."""
    node_drain_s: float = 60.0
    """How long a draining node may take to finish its requests."""
    worker_drain_s: float = 600.0
    """How long a draining router worker may take to finish its streams."""
    new_request_wait_s: float = 2.0
    """How long a new request waits for nodes that can serve it before it ends with 503. 0: not at all."""
    migration_wait_s: float = 30.0
    """How long a request that already has tokens waits for nodes with the weights that produced them, while only nodes
    with other weights serve its model's name. Then it ends with 503."""
    resolve_s: float = 5.0
    """Interval at which the host names in discovery.announce_to are resolved again."""
    deadline_grace_s: float = 1.0
    """A node's own deadline for a request is this much later than the router worker's."""
    link_heartbeat_s: float = 1.0
    """Interval of ZeroMQ's own heartbeats on every connection."""
    link_timeout_s: float = 3.0
    """A connection without a heartbeat or a complete message for this long is closed, so a piece of KV must cross the
    network in less."""
    reconnect_min_s: float = 0.1
    """First delay before a lost connection is tried again; it doubles each time."""
    reconnect_max_s: float = 2.0
    """Longest such delay."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the control protocol."""

    max_attempts: int = 5
    """A request ends after this many losses in a row without a new token from a decode node."""
    crash_limit: int = 2
    """A request ends when it was running at this many crashes of nodes: it may be their cause."""
    max_preemptions: int = 3
    """How often a decode node may preempt the same request."""
    unreserved_prompt_share: float = 0.25
    """Share of a prefill node's KV blocks that computed prompts without a granted decode reservation may hold."""
    reserved_share: float = 0.5
    """Share of a decode node's KV blocks that uncommitted reservations may hold."""
    retained_share: float = 0.5
    """Share of a prefill node's KV blocks that may be retained after failed hand-overs."""
    watermark_blocks_share: float = 0.02
    """Share of a decode node's KV blocks that is kept free so that running requests can grow."""
    transfers_per_peer: int = 4
    """Most concurrent KV transfers from a prefill node to one decode node."""
    transfers_per_node: int = 16
    """Most concurrent KV transfers from a prefill node."""
    staging_slots_per_transfer: int = 8
    """Most staging slots of one KV transfer."""
    control_high_water: int = 1000
    """ZeroMQ's send high-water mark of a control socket, in messages."""
    outbox_messages: int = 10000
    """Messages queued for a peer that does not keep up; beyond it the link counts as down."""
    job_token_ids_max_bytes: int = 4_194_304
    """Largest array of token ids in one Job."""
    header_max_bytes: int = 8_388_608
    """Largest JSON header of a message."""
    piece_max_bytes: int = 268_435_456
    """Largest piece of KV."""
    piece_target_bytes: int = 1_048_576
    """Preferred size of a piece of KV: layers are grouped, or the tokens of one layer split, to reach about it."""
    queued_reservations: int = 256
    """Most reservations that wait for room in a decode node."""
    queued_requests: int = 1024
    """Most requests that wait in a prefill node."""
    queued_tokens: int = 1_048_576
    """Most prompt tokens that wait in a prefill node."""
    retry_tokens_per_node: int = 65_536
    """Most tokens of requests placed again that a router worker has at one prefill node at a time; further ones wait in
    the worker."""
