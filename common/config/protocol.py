"""Timers and limits of the control protocol, each named and documented. Defaults are the protocol's own.

Read by the pure cores; filled from `[timers]` and `[limits]` of the cluster file. Units are in the names.
"""

import msgspec


class Timers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every wait of the protocol."""

    heartbeat_s: float = 0.5
    """Between two Beats of a client, two Statuses of a node, two announcements."""
    suspect_s: float = 1.5
    """Silence after which a node gets no new work."""
    dead_after_s: float = 2.5
    """Silence on the needed link after which a node counts as dead."""
    client_timeout_s: float = 3.0
    """Silence of a client after which a node frees everything of it."""
    worker_timeout_s: float = 2.0
    """A decode node refuses a reservation for a worker that it has not heard for this long."""
    late_tick_s: float = 0.5
    """A process whose own tick comes this late first drains its inbox, and to no silence counts more than a beat."""
    engine_stall_s: float = 10.0
    """Work waiting, and no engine step nor, in a long one, a layer for this long: the node counts as dead."""
    engine_stall_exit_s: float = 30.0
    """After this the node's control thread ends its own process."""
    reserve_timeout_s: float = 1.0
    """Without an answer to Reserve: next candidate."""
    queued_wait_s: float = 5.0
    """After Queued: next candidate, if there is one. Without one the place in the queue is kept, and asked about again
    after as long."""
    grant_idle_timeout_s: float = 5.0
    """While others wait for room: a grant for which no piece came for this long is taken back."""
    retransmit_s: float = 0.5
    """Between repetitions of Reserve and of Commit."""
    commit_timeout_s: float = 5.0
    """Commit unanswered for this long: the hand-over failed."""
    piece_idle_timeout_s: float = 5.0
    """Committed, and no piece came for this long: the missing ones are asked for once, then the request is lost."""
    quarantine_s: float = 6.0
    """Transport timeout + 1 s: how long an unconfirmed staging slot of a one-sided transport rests."""
    retain_s: float = 10.0
    """How long computed KV is kept after a failed hand-over."""
    paused_reservation_s: float = 2.0
    """A prefill paused for longer gives its reservation back."""
    swap_wait_s: float = 2.0
    """A request that was swapped to the host's memory and finds no room on the device for this long is given back."""
    aging_s: float = 10.0
    """Waiting this long raises a request's priority by one class."""
    pair_penalty_s: float = 10.0
    """How long a failed (prefill, decode) pair is avoided."""
    retry_jitter_s: float = 0.1
    """Re-plans after a death start within this time."""
    backoff_min_s: float = 0.1
    """The first wait before a refused or preempted request is tried again; it doubles."""
    backoff_max_s: float = 2.0
    """The longest of these waits."""
    node_drain_s: float = 60.0
    """How long a draining node finishes what it has."""
    worker_drain_s: float = 600.0
    """How long a draining router worker lets streams finish."""
    new_request_wait_s: float = 2.0
    """How long a new request waits for nodes that can serve it, before it is refused with 503; 0: not at all."""
    migration_wait_s: float = 30.0
    """How long a request that holds tokens waits for nodes with the weights that drew them, while only others serve its
    model's name, before it ends with 503."""
    resolve_s: float = 5.0
    """Between two resolutions of the router hosts' name."""
    deadline_grace_s: float = 1.0
    """A node's own deadline is this much later than the worker's."""
    link_heartbeat_s: float = 1.0
    """ZeroMQ's own heartbeat on every connection."""
    link_timeout_s: float = 3.0
    """A connection without a heartbeat or a whole message for this long is closed: pieces of KV must cross in less."""
    reconnect_min_s: float = 0.1
    """The first wait before a lost connection is tried again; it doubles."""
    reconnect_max_s: float = 2.0
    """The longest of these waits."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every bound of the protocol."""

    max_attempts: int = 5
    """Losses in a row, without a new token from a decode node, at which a request ends."""
    crash_limit: int = 2
    """A request that was running at this many crashes ends: it may be their cause."""
    max_preemptions: int = 3
    """How often decode may give one request back."""
    unreserved_prompt_share: float = 0.25
    """Share of the prefill blocks that computed, not yet granted prompts may hold."""
    reserved_share: float = 0.5
    """Share of the decode blocks that uncommitted reservations may hold."""
    retained_share: float = 0.5
    """Share of the prefill blocks that are kept after failed hand-overs."""
    watermark_blocks_share: float = 0.02
    """Share of the decode blocks kept free so that running requests can grow."""
    transfers_per_peer: int = 4
    """Hand-overs to one decode node whose pieces may be under way at once."""
    transfers_per_node: int = 16
    """Hand-overs of one prefill node whose pieces may be under way at once."""
    staging_slots_per_transfer: int = 8
    """Staging slots that one hand-over gets at most."""
    control_high_water: int = 1000
    """ZeroMQ's high-water mark for messages that leave a control socket."""
    outbox_messages: int = 10000
    """Messages kept for a peer that is full; beyond it the link counts as down."""
    job_token_ids_max_bytes: int = 4_194_304
    """Token ids in one Job."""
    header_max_bytes: int = 8_388_608
    """One JSON header."""
    piece_max_bytes: int = 268_435_456
    """One piece of KV."""
    piece_target_bytes: int = 1_048_576
    """Layers are grouped, or the tokens of one layer parted, until a piece has about this size."""
    queued_reservations: int = 256
    """Reservations a decode node lets wait for room."""
    queued_requests: int = 1024
    """Requests a prefill node lets wait."""
    queued_tokens: int = 1_048_576
    """Prompt tokens a prefill node lets wait."""
    retry_tokens_per_node: int = 65_536
    """Tokens of requests planned again that a router worker has at one prefill node at a time; the rest waits in it."""
