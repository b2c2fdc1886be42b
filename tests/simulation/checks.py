"""Invariants of every schedule: of each request while it runs, and of the cluster when it is quiet."""

from dataclasses import dataclass, field

from kvferry.common.base.errors import GenerationError, OverloadedError, UnavailableError
from kvferry.common.base.ids import RequestId
from kvferry.decode_node.role import DecodeRole
from kvferry.decode_node.staging_slots import StagingSlots
from kvferry.ops.simulate.model import EOS_TOKEN_ID, undisturbed
from kvferry.ops.simulate.node import SimNode
from kvferry.ops.simulate.process import Process
from kvferry.ops.simulate.worker import SimulatedStream, SimWorker
from kvferry.ops.simulate.world import World
from kvferry.prefill_node.handover_table import SendState
from kvferry.prefill_node.jobs import WANTED_AT_DECODE
from kvferry.prefill_node.role import PrefillRole
from kvferry.router.api import EndEvent, StreamEvent, TokensEvent
from kvferry.router.core.request import RequestState

ENOUGH_S = 7.0
"""Without further faults a request ends within this time, whatever happened to it before."""
SLOW_STEP_S = 0.05
"""With longer steps the tokens of a request preempted once may take `ENOUGH_S`: each token restarts the bound."""
RECOVERY_S = 3.2
"""Bound from the end of the last fault until the cluster must serve: links time out, reconnect and say Hello."""
LINKS_UP_S = 3.0
"""Without faults all links are up by then, even on the slowest network."""


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(slots=True)
class StreamChecker:
    """Checks one request from the side of its client."""

    stream: SimulatedStream
    poisoned: bool
    must_succeed: bool = False
    slack_s: float = 0.5
    """Delay of an end after the deadline: a tick, and freezes of the worker."""
    may_leave_at: float | None = None
    slow_engine: bool = False
    """Steps take longer than `SLOW_STEP_S`."""
    weights: frozenset[int] = frozenset({0})
    """Weights of all nodes that serve the model; those that sampled the first token must sample all."""
    last_token_at: float = 0.0
    ended_at: float = 0.0
    possible: list[tuple[int, ...]] = field(init=False)
    """Undisturbed streams that begin with the tokens received."""
    ended: EndEvent | None = None

    def __post_init__(self) -> None:
        request = self.stream.request
        ids, sampling = request.spec.prompt_token_ids, request.spec.sampling
        self.possible = [undisturbed(ids, sampling, weights) for weights in sorted(self.weights)]

    @property
    def _name(self) -> str:
        return f"request {self.stream.request.request_id[:8]}"

    @property
    def deadline(self) -> float:
        """Absolute time."""
        return self.stream.sent_at + self.stream.request.timeout_s

    def take(self, event: StreamEvent, now: float) -> None:
        """Check an event that the client receives."""
        if self.ended is not None:
            raise Violation(f"{self._name} received an event after its end: {event}")
        if isinstance(event, TokensEvent):
            self._tokens(event)
            self.last_token_at = now
        else:
            self.ended, self.ended_at = event, now
            self._end(event, now)
            self.check_time(now)

    def _tokens(self, event: TokensEvent) -> None:
        seen = self.stream.token_ids
        if event.index != len(seen) or not event.token_ids:
            raise Violation(f"{self._name}: index {event.index} after {len(seen)} tokens")
        part = slice(event.index, event.index + len(event.token_ids))
        wanted = [stream[part] for stream in self.possible]
        if event.token_ids not in wanted:
            raise Violation(f"{self._name}: tokens {event.token_ids} at {event.index} instead of {wanted}")
        self.possible = [stream for stream in self.possible if stream[part] == event.token_ids]
        seen.extend(event.token_ids)

    def _end(self, event: EndEvent, now: float) -> None:
        seen = self.stream.token_ids
        if event.usage.completion_tokens != len(seen):
            raise Violation(f"{self._name}: usage says {event.usage.completion_tokens} tokens of {len(seen)}")
        if (event.error is None) != (event.outcome in ("stop", "length", "timeout", "cancelled")):
            raise Violation(f"{self._name} ended with {event.outcome} and {event.error!r}")
        true_ends = [_end_of(stream) for stream in self.possible]
        if event.outcome in ("stop", "length") and (event.outcome, len(seen)) not in true_ends:
            raise Violation(f"{self._name} ended with {event.outcome} at {len(seen)} tokens of {self.possible}")
        if event.outcome == "timeout" and now < self.deadline:
            raise Violation(f"{self._name} timed out {self.deadline - now:.3f} s early")
        if event.outcome == "cancelled" and self.may_leave_at is None:
            raise Violation(f"{self._name} was cancelled without a cause")
        if isinstance(event.error, UnavailableError) and self.stream.worker.core.draining_since is None:
            self._unavailable(now)

    def _unavailable(self, now: float) -> None:
        """Check that it had no tokens, waited for the whole bound, and still has no nodes that can serve it."""
        core, waited_s = self.stream.worker.core, now - self.stream.sent_at
        if self.stream.token_ids and len(self.weights) > 1 and now - self.last_token_at >= core.timers.migration_wait_s:
            return  # its nodes did not return, and other weights cannot continue it
        if self.stream.token_ids:
            raise Violation(f"{self._name} is refused after {len(self.stream.token_ids)} tokens")
        if core.not_ready_reason(self.stream.request.spec.model) is None:
            raise Violation(f"{self._name} is refused although nodes can serve it")
        if not -1e-6 < waited_s - core.timers.new_request_wait_s < self.slack_s:
            raise Violation(f"{self._name} waited {waited_s:.2f} s for nodes, not {core.timers.new_request_wait_s:g}")

    def check_time(self, now: float) -> None:
        """Check that the deadline of an unfinished request has not passed."""
        if now > self.deadline + self.slack_s:
            raise Violation(f"{self._name} is not over {now - self.deadline:.2f} s after its deadline")

    def verdict(self, *, troubled: bool, calm_at: float) -> str:
        """Return how the request ended. Raises Violation when the faults do not explain that end.

        troubled: the schedule has faults. calm_at: when the last fault that could affect the request was over.
        """
        stream = self.stream
        if stream.refused is not None:
            kind = "refused " + type(stream.refused).__name__
            linked = stream.sent_at > LINKS_UP_S and not troubled
            if self.must_succeed or (linked and not isinstance(stream.refused, OverloadedError)):
                raise Violation(f"{self._name} was refused: {stream.refused}")
            return kind
        if self.ended is None:
            return "worker died"
        error, outcome = self.ended.error, self.ended.outcome
        if self.must_succeed and outcome not in ("stop", "length"):
            raise Violation(f"{self._name} had to succeed and ended with {outcome}: {error}")
        progress_at = self.last_token_at if self.slow_engine else 0.0
        calm_s = self.deadline - max(self.stream.sent_at, calm_at, progress_at)
        if outcome == "timeout" and calm_s > ENOUGH_S:
            raise Violation(f"{self._name} timed out without any fault in the {calm_s:.1f} s before its deadline")
        if outcome == "error":
            self._check_error(error, troubled, calm_at)
            return f"error {type(error).__name__}"
        return outcome

    def _check_error(self, error: Exception | None, troubled: bool, calm_at: float) -> None:
        if isinstance(error, GenerationError):
            if not self.poisoned:
                raise Violation(f"{self._name} failed to generate: {error}")
        elif isinstance(error, UnavailableError):
            up_at = calm_at + RECOVERY_S if troubled else LINKS_UP_S
            if self.ended_at > up_at and self.stream.worker.core.draining_since is None:
                raise Violation(f"{self._name} is refused {self.ended_at - calm_at:.1f} s after the last fault")
        elif not troubled and not isinstance(error, OverloadedError):
            raise Violation(f"{self._name} failed without any fault: {error}")


def _end_of(stream: tuple[int, ...]) -> tuple[str, int]:
    return "stop" if stream[-1] == EOS_TOKEN_ID else "length", len(stream)


def find_unnoticed(world: World, gone: Process, within_s: float) -> str | None:
    """Return which process still depends on one that has ended or is frozen, or None.

    A process that was asleep itself has `within_s` from its waking.
    """
    for worker in world.workers.values():
        for request_id in requests_waiting_at(worker, gone) if worker.awake_for(within_s) else ():
            return f"{worker.host} still has {request_id[:8]} at {gone.host}, which is gone"
    for node in world.nodes.values():
        for role in node.core.roles if node.awake_for(within_s) else ():
            for _, sender in role.jobs.aimed_at(gone.incarnation) if isinstance(role, PrefillRole) else ():
                # ASKING has its own bound of a second.
                if sender.state in WANTED_AT_DECODE and sender.state is not SendState.ASKING:
                    return f"{node.host} still hands {sender.job.request_id[:8]} to {gone.host}, which is gone"
    return None


def requests_waiting_at(worker: SimWorker, node: Process) -> dict[RequestId, int]:
    """Return the requests of a worker that wait at a node, with their placement numbers."""
    found: dict[RequestId, int] = {}
    for request in worker.core.requests.values():
        prefill = request.placement.prefill if request.placement is not None else None
        waits_at = {RequestState.PLACED: prefill, RequestState.HANDED_OVER: request.decode}.get(request.state)
        if request.placement is not None and waits_at == node.incarnation:
            found[request.request_id] = request.placement.placement_no
    return found


def find_unreleased(world: World) -> str | None:
    """Return which resource is still held at the end of all requests, or None."""
    for node in world.nodes.values():
        if not node.alive:
            continue
        if not node.core.is_quiescent():
            return f"{node.host} holds something: {node.pool.num_held} blocks; {_roles(node.core.roles)}"
        if node.pool.num_held:
            return f"{node.host} holds {node.pool.num_held} blocks"
        if node.kv_receiver.expected:
            return f"{node.host} expects pieces of {len(node.kv_receiver.expected)} hand-overs"
        for staging in staging_slots(node):
            if staging.num_granted:
                return f"{node.host} has {staging.num_granted} staging slots that may be written"
    for worker in world.workers.values():
        if worker.alive and not worker.core.is_quiescent():
            return f"{worker.host} has {len(worker.core.requests)} requests"
        if worker.alive and len(worker.core.links.links) > len(world.nodes):
            return f"{worker.host} has {len(worker.core.links.links)} links"
    return None


def staging_slots(node: SimNode) -> list[StagingSlots]:
    """Return the staging slots of the decode role, if any."""
    return [role.staging for role in node.core.roles if isinstance(role, DecodeRole)]


def find_unreleased_slots(world: World) -> str | None:
    """Return which staging slots are not free although no write can land any more, or None."""
    for node in world.nodes.values():
        for staging in staging_slots(node) if node.alive else ():
            if staging.num_granted or staging.num_quarantined:
                return (
                    f"{node.host}: {staging.num_granted} staging slots granted, {staging.num_quarantined} quarantined"
                )
    return None


def _roles(roles: object) -> str:
    return str(roles)[:1500]
