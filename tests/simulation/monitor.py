"""Observes every event and action of every process: checks rules across processes, and counts messages."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation, RequestId, TransferKey
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.events import PieceBad, Received, Tick
from kvferry.common.protocol.messages import (
    Abort,
    Cancel,
    Commit,
    Committed,
    Envelope,
    Gone,
    Granted,
    HandedOver,
    HandoverFailed,
    HelloRefused,
    Job,
    Message,
    Queued,
    Refused,
    Reserve,
    Revoke,
    Welcome,
)
from kvferry.ops.simulate.kv_receiver import BELOW, OTHER_SLOT
from kvferry.ops.simulate.node import SimNode
from kvferry.ops.simulate.process import Process
from kvferry.ops.simulate.worker import SimulatedStream, SimWorker
from tests.simulation.checks import Violation
from tests.simulation.incompatible import refused_field

LONGEST_STEP_S = 1.0
"""Longer than any step of a simulated engine."""


@dataclass(slots=True)
class Monitor:
    """Rules across processes. `observe` is the trace of every process."""

    also: Callable[[Process, object], None] | None = None
    """A further trace, called first."""
    clock_slack_s: float = 0.01
    """Tolerance of ages and deadlines: the time that workers are frozen."""
    incompatible: Mapping[str, str] = field(default_factory=dict)
    """Name of each node that is incompatible now -> the field that differs."""
    counts: Counter[str] = field(default_factory=Counter)
    _ticked: dict[str, float] = field(default_factory=dict)
    _targets: dict[tuple[RequestId, int], TransferKey] = field(default_factory=dict)
    _granted: dict[TransferKey, set[Granted]] = field(default_factory=dict)
    """Distinct grants: a Reserve that arrives late, after a Cancel or an Abort, is granted again."""
    _cancelled: dict[tuple[Incarnation, RequestId], int] = field(default_factory=dict)
    """Latest attempt in a Cancel that a node received."""
    _aborted: set[TransferKey] = field(default_factory=set)
    _preempted: dict[RequestId, set[int]] = field(default_factory=dict)
    _owners: dict[tuple[RequestId, int], Incarnation] = field(default_factory=dict)

    def observe(self, process: Process, what: object) -> None:
        """Check an event before it is handled, or an action before it is performed."""
        if self.also is not None:
            self.also(process, what)
        match what:
            case Send(_, message):
                self._sent(process, message)
            case Received(envelope):
                self._received(process, envelope)
            case Tick() if isinstance(process, SimNode):
                self._check_engine(process)
            case PieceBad(key, _, reason) if reason.startswith((BELOW, OTHER_SLOT)):
                self._check_earlier_grant(process, key, reason)
            case _:
                pass

    def _received(self, process: Process, envelope: Envelope) -> None:
        match envelope.message:
            case Abort(key=key):
                self._aborted.add(key)
            case Cancel(request_id=request_id, attempt=attempt) if envelope.receiver == process.incarnation:
                cancelled = process.incarnation, request_id
                self._cancelled[cancelled] = max(attempt, self._cancelled.get(cancelled, 0))
            case _ if self.incompatible:
                self._check_incompatible(process, envelope)
            case _:
                pass

    def _check_incompatible(self, process: Process, envelope: Envelope) -> None:
        """Check that an incompatible node gets no work. Messages for an earlier incarnation are allowed."""
        work = isinstance(envelope.message, Job | Reserve | Commit) and envelope.receiver == process.incarnation
        if work and process.host in self.incompatible:
            raise Violation(f"incompatible node {process.host} gets a {type(envelope.message).__name__}")
        match envelope.message:
            case HelloRefused(reason=reason):
                self._check_refusal(reason)
            case Welcome(compatibility=theirs) if isinstance(process, SimNode):
                if theirs != process.spec.compatibility:
                    raise Violation(f"{process.host} receives Welcome from an incompatible node")
            case _:
                pass

    def _check_earlier_grant(self, process: Process, key: TransferKey, reason: str) -> None:
        """Check that a late piece belongs to an earlier grant of a key granted twice, after its Cancel or Abort."""
        cancelled = self._cancelled.get((process.incarnation, key.request_id), 0) >= key.attempt
        if not (cancelled or key in self._aborted) or len(self._granted.get(key, ())) < 2:
            raise Violation(f"{process.host}: {reason}")

    def _check_clocks(self, process: Process, stream: SimulatedStream, message: Job) -> None:
        """Check that age and deadline continue over all attempts."""
        waited_s = process.loop.now() - stream.sent_at
        wrong = abs(message.waited_ms / 1000 - waited_s) > self.clock_slack_s
        remaining_s = max(0.0, stream.request.timeout_s - waited_s)
        if wrong or abs(message.remaining_ms / 1000 - remaining_s) > self.clock_slack_s:
            raise Violation(f"attempt {message.attempt} of {message.request_id[:8]} restarts its age or deadline")

    def _check_engine(self, node: SimNode) -> None:
        """Check that an engine with work makes steps, unless its node has just been frozen or stalled."""
        now, before = node.loop.now(), self._ticked.get(node.host, 0.0)
        self._ticked[node.host] = now
        still_s = now - node.core.progress.last_progress
        awake = now - before < 2 * node.tick_s and not node.engine.stopped
        if awake and still_s > LONGEST_STEP_S and node.core.scheduler.work_waiting:
            raise Violation(f"{node.host} has work and has made no step for {still_s:.2f} s")

    def _check_refusal(self, reason: str) -> None:
        """Check that a HelloRefused names the field that differs."""
        named = reason.partition(":")[0]
        self.counts[f"HelloRefused {named}"] += 1
        if named not in [refused_field(field) for field in self.incompatible.values()]:
            raise Violation(f"a Hello is refused for {reason}, which is not the field that differs")

    def _check_commit(self, process: Process, key: TransferKey) -> None:
        """Check that an attempt is committed to one decode node only, and under a grant."""
        if key not in self._granted:
            raise Violation(f"{process.host} commits {key.request_id[:8]} without a grant")
        target = self._targets.setdefault((key.request_id, key.attempt), key)
        if target != key:
            raise Violation(f"attempt {key.attempt} of {key.request_id[:8]} is committed to a second decode node")

    def _check_preempted(self, node: SimNode, message: Gone) -> None:
        """Check that no request is preempted more than max_preemptions times, except by draining nodes."""
        if node.core.draining_since is not None:
            return
        attempts = self._preempted.setdefault(message.request_id, set())
        attempts.add(message.attempt)
        if len(attempts) > node.spec.limits.max_preemptions:
            raise Violation(f"{message.request_id[:8]} is preempted {len(attempts)} times")

    def _sent(self, process: Process, message: Message) -> None:
        match message:
            case Committed(key=key):
                owner = self._owners.setdefault((key.request_id, key.attempt), key.decode)
                if owner != key.decode:
                    raise Violation(
                        f"attempt {key.attempt} of {key.request_id[:8]} is owned by {process.host} "
                        f"and was owned by another decode node before"
                    )
            case Job(attempt=attempt):
                self.counts["Job again" if attempt > 1 else "Job"] += 1
                stream = process.streams[message.request_id] if isinstance(process, SimWorker) else None
                if stream is not None and list(message.spec.output_token_ids) != stream.token_ids:
                    raise Violation(f"attempt {attempt} of {message.request_id[:8]} omits tokens that the client has")
                if stream is not None:
                    self._check_clocks(process, stream, message)
            case Granted(key=key) if isinstance(process, SimNode):
                self._granted.setdefault(key, set()).add(message)
                if process.core.draining_since is not None:
                    raise Violation(f"{process.host} grants a reservation while draining")
            case Commit(key=key):
                self._check_commit(process, key)
            case HandoverFailed(reason=reason, commit_sent=commit_sent):
                self.counts[f"HandoverFailed {reason}{' after Commit' if commit_sent else ''}"] += 1
            case Gone(reason=reason, detail=detail):
                self.counts[f"Gone {reason} {detail[:30]}".strip()] += 1
                if reason == "preempted" and isinstance(process, SimNode):
                    self._check_preempted(process, message)
            case Refused(reason=reason):
                self.counts[f"Refused {reason[:30]}"] += 1
            case Queued():
                self.counts["Queued"] += 1
            case Revoke(reason=reason):
                self.counts[f"Revoke {reason[:30]}"] += 1
            case HandedOver():
                self.counts["HandedOver"] += 1
