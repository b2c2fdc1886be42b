"""The prefill role: computes prompts, sends first tokens, hands requests over. Pure.

The life of a request here:
 1. Job: queued by priority and age, unless its worker's list says that it is not wanted any more (`intake.py`).
 2. It starts when blocks for all its tokens are there. In the same moment the best candidate is asked to reserve.
 3. Chunks are computed; pieces of KV go out as soon as there is a grant, layer group by layer group (`ferry.py`).
 4. The next token is drawn here and goes straight to the worker. If it ends the request, nothing is handed over.
 5. Commit to one candidate; when that owns the request: HandedOver, and the blocks become prefix cache (`jobs.py`).
 6. No candidate left, or the Commit failed: HandoverFailed; the KV is held a while for the next attempt.

In a process with a decode role too, a job that names this node, or none, stays: its blocks are those that it decodes
with, no decode node is asked, nothing is ferried. With its first token it is the decode role's.
"""

from dataclasses import dataclass, field

import msgspec

from kvferry.common.base.ids import (
    AttemptKey,
    Incarnation,
    RequestId,
    TransferKey,
)
from kvferry.common.cluster.actions import (
    Action,
    Send,
)
from kvferry.common.cluster.clients import Client
from kvferry.common.cluster.events import (
    Event,
    KvSendFailed,
    LayersDone,
    PieceSent,
    PiecesStopped,
    Tick,
)
from kvferry.common.cluster.node_role import (
    LocalDecode,
    LocalHandover,
)
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.messages import Cancel, FirstToken, Job, Message, RoleName
from kvferry.common.scheduling.events import (
    ChunkComputed,
    Failed,
    Finished,
    Preempted,
    Prefilled,
    Sampled,
    SchedulerEvent,
    Started,
)
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SequenceSpec, SequenceStatus
from kvferry.common.scheduling.step import StepBatch
from kvferry.prefill_node import job as reports
from kvferry.prefill_node.admission import JobAdmission
from kvferry.prefill_node.decode_links import DecodeLinks
from kvferry.prefill_node.job import (
    JobEvent,
    PrefillJob,
)
from kvferry.prefill_node.jobs import (
    LIVE,
    JobTable,
)
from kvferry.prefill_node.transfer import HandoverManager


@dataclass(slots=True)
class PrefillRole:
    """All requests of the prefill role of one process."""

    self_id: Incarnation
    scheduler: Scheduler
    timers: Timers
    limits: Limits
    shape: KvShape
    decodes: DecodeLinks
    num_blocks: int
    block_size: int
    here: LocalDecode | None = None
    """The decode role of the same process, if it has one."""
    name: RoleName = "prefill"
    jobs: JobTable = field(init=False)
    _admission: JobAdmission = field(init=False)
    _handovers: HandoverManager = field(init=False)
    _last_heartbeat: float = -1e9

    def __post_init__(self) -> None:
        self.jobs = JobTable(self.scheduler)
        self._admission = JobAdmission(
            self.self_id,
            self.jobs,
            self.scheduler,
            self.decodes,
            self.timers,
            self.limits,
            self.num_blocks * self.block_size,
            self.here,
        )
        self._handovers = HandoverManager(
            self.self_id,
            self.jobs,
            self.scheduler,
            self.decodes,
            self.timers,
            self.limits,
            self.shape,
            self.num_blocks,
        )

    # -- messages of workers

    def handles(self, message: Message) -> bool:
        """Job comes from workers; answers of decode nodes come over the role's own links."""
        return isinstance(message, Job)

    def on_message(self, client: Client, message: Message, now: float) -> list[Action]:
        """See the module's docstring."""
        match message:
            case Job():
                return self._admission.on_job(client, message, now)
            case Cancel():
                return self._on_cancel(client, message, now)
            case _:
                return []

    def _on_cancel(self, client: Client, message: Cancel, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in self.jobs.of_request(message.request_id):
            if job.worker == client.incarnation and job.job.attempt <= message.attempt:
                actions += self.jobs.drop(job, now)
        return actions

    # -- lists

    def on_heartbeat(self, client: Client, now: float) -> list[Action]:
        """Free what the worker's list no longer has; answer what it expects."""
        actions: list[Action] = []
        for job in self.jobs.of_worker(client.incarnation):
            if not client.wants(job.job.placement_no, *job.attempt_key):
                actions += self.jobs.drop(job, now)
        for entry in client.entries.values():
            known = self.jobs.by_attempt.get(AttemptKey(entry.request_id, entry.attempt))
            if entry.expected and known is not None and known.worker == client.incarnation:
                actions += reports.state(known, entry.next_index, entry.resend)
        return actions

    def on_client_lost(self, client: Client, now: float) -> list[Action]:
        """A worker loses all it had."""
        actions: list[Action] = []
        for job in self.jobs.of_worker(client.incarnation):
            actions += self.jobs.drop(job, now)
        return actions

    def knows(self, request_id: RequestId, attempt: int) -> bool:
        """Whether anything is held or recorded for this attempt."""
        job = self.jobs.by_attempt.get(AttemptKey(request_id, attempt))
        return job is not None and not job.delisted

    # -- scheduler

    def may_start(self, spec: SequenceSpec) -> bool:
        """Computed tokens without a grant are bounded; one job may always run. What stays needs no grant."""
        if spec.mode == "decode":
            return True
        left = spec.sampling.max_new_tokens - (len(spec.token_ids) - spec.num_prompt_tokens)
        if left <= 1:
            return True
        ungranted = self.jobs.ungranted_blocks
        want = -(-(len(spec.token_ids) + 1) // self.block_size)
        return ungranted == 0 or ungranted + want <= self.limits.unreserved_prompt_share * self.num_blocks

    def wants_layers(self, plan: StepBatch) -> bool:
        """Report layers when something of this step is to be ferried."""
        return self._handovers.wants_layers(plan)

    def owns(self, seq_id: int) -> bool:
        """See Leg."""
        return seq_id in self.jobs.by_seq

    def on_scheduler(self, event: SchedulerEvent, now: float) -> list[Action]:
        """What became of a job's sequence."""
        job = self.jobs.by_seq[event.seq_id]
        actions = self._on_sequence(job, event, now)
        self.jobs.sync_pin(job)
        return actions

    def _on_sequence(self, job: PrefillJob, event: SchedulerEvent, now: float) -> list[Action]:
        match event:
            case Started(num_cached_tokens=cached):
                return self._handovers.on_started(job, cached, now)
            case ChunkComputed(token_start=start, token_end=end):
                return self._handovers.on_chunk(job, start, end, now)
            case Sampled(token_id=token_id, index=index):
                self._note_first_token(job, token_id, index)
                if job.stays and self.scheduler.status(event.seq_id) is SequenceStatus.DECODING:
                    return self._continue_here(job, event, now)
            case Prefilled():
                return self._handovers.on_prefilled(job, event, now)
            case Finished(reason=reason):
                return self._on_finished(job, reason, now)
            case Failed(why=why):
                self.jobs.detach(job)
                return self._handovers.fail(job, "generation", now, detail=why, retryable=False)
            case Preempted():
                self.jobs.detach(job)
                return self._handovers.fail(job, "lost", now, detail="preempted")
        return []

    def _note_first_token(self, job: PrefillJob, token_id: int, index: int) -> None:
        """It is sent with what comes next: Prefilled, or Finished when it ends the request."""
        job.first_token = FirstToken(
            request_id=job.job.request_id,
            attempt=job.job.attempt,
            index=index,
            token_id=token_id,
            cached_tokens=job.cached_tokens,
        )

    def _continue_here(self, job: PrefillJob, first: Sampled, now: float) -> list[Action]:
        """Its prompt is computed and it decodes already: from now on the decode role answers for it."""
        assert self.here is not None
        assert job.first_token is not None
        computed = LocalHandover(
            key=TransferKey(job.job.request_id, job.job.attempt, 0, self.self_id, self.self_id),
            worker=job.worker,
            placement_no=job.job.placement_no,
            spec=job.spec,
            deadline=job.deadline,
            output_token_ids=job.job.output_token_ids,
            seq_id=first.seq_id,
            token_id=first.token_id,
            index=first.index,
            cached_tokens=job.cached_tokens,
        )
        self.jobs.detach(job)
        self.jobs.forget(job)
        return [
            Send(job.worker, job.first_token),
            Send(job.worker, reports.handed_over_to(job.job, self.self_id)),
            *self.here.take(computed, now),
        ]

    def _on_finished(self, job: PrefillJob, reason: str, now: float) -> list[Action]:
        self.jobs.detach(job)
        if job.is_record:
            return []
        job.machine.move(JobEvent.FINISH, now)
        assert job.first_token is not None
        finish = "stop" if reason == "stop" else "length"
        job.first_token = msgspec.structs.replace(job.first_token, finish=finish)
        return [*self.jobs.abort_sender(job, now), Send(job.worker, job.first_token)]

    # -- links, transport, time

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Answers of decode nodes, links, the transport, layers."""
        match event:
            case PieceSent() | PiecesStopped() | KvSendFailed():
                return self._handovers.on_transport(event, now)
            case LayersDone(step_id, layers):
                return self._handovers.on_layers(step_id, layers, now)
            case _:
                return self._handovers.on_link_event(event, now)

    def tick(self, now: float) -> list[Action]:
        """Repeat, give up, let go; and the list for the decode nodes."""
        actions = self._handovers.on_link_event(Tick(), now)
        for job in self.jobs:
            actions += self._handovers.tick_job(job, now)
        if now - self._last_heartbeat >= self.timers.heartbeat_s:
            self._last_heartbeat = now
            actions += self.decodes.heartbeats(self.jobs.open_senders(), self._handovers.transfer_no)
        return actions

    def flush(self, now: float) -> list[Action]:
        """Give transfer slots in the order of the jobs' age."""
        return self._handovers.give_slots(now)

    # -- the end

    def drain(self, now: float) -> list[Action]:
        """No new jobs; what is here goes on."""
        self._admission.draining = True
        return []

    def preempt_all(self, now: float) -> list[Action]:
        """Give back what is not handed over: it is planned again elsewhere."""
        actions: list[Action] = []
        for job in self.jobs:
            if job.state in LIVE and not job.delisted:
                actions += self.jobs.abort_sender(job, now)
                self.jobs.release(job)
                job.machine.move(JobEvent.PREEMPT, now)
                actions.append(reports.preempted(job))
        return actions

    def is_quiescent(self) -> bool:
        """Nothing is held and nothing is recorded."""
        return not self.jobs.by_attempt and not self.jobs.by_seq

    def check_invariants(self) -> None:
        """Raises InvariantError when the indexes disagree."""
        self.jobs.check_invariants()
