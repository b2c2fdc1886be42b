"""The prefill role: computes prompts, sends first tokens, hands requests over. Pure.

The life of a request here:
 1. A Job is queued by priority and age, unless its worker's wanted set has dropped it (`admission.py`).
 2. It starts when there are blocks for all its tokens; in the same moment the best candidate is asked to reserve.
 3. Chunks are computed. After a grant, pieces of KV go out by groups of layers (`transfer.py`, `handover.py`).
 4. The next token is sampled here and goes straight to the worker. If it ends the request, nothing is handed over.
 5. Commit to one candidate. When that owns the request: HandedOver, and the blocks become prefix cache (`jobs.py`).
 6. No candidate left, or the Commit failed: HandoverFailed; the KV is retained a while for the next attempt.

In a process that has a decode role too, a job that names this node or no node decodes here, on the same blocks: no
decode node is asked, nothing is transferred, and the decode role adopts it with its first token.
"""

from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from kvferry.common.base.ids import AttemptKey, RequestId, TransferKey
from kvferry.common.cluster.actions import Action, Send
from kvferry.common.cluster.clients import Client
from kvferry.common.cluster.events import (
    Event,
    KvSendFailed,
    LayersDone,
    LinkClosed,
    LinkConnected,
    PieceSent,
    PiecesStopped,
    ProbeAnswered,
    Received,
    Tick,
)
from kvferry.common.cluster.links import LinkTable
from kvferry.common.cluster.node_role import LocalDecode, LocalHandover, RoleContext
from kvferry.common.protocol.messages import Cancel, FirstToken, Hello, Job, Message, RoleName
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
from kvferry.common.scheduling.sequence import SequenceSpec, SequenceStatus
from kvferry.common.scheduling.step import StepBatch
from kvferry.prefill_node import job as replies
from kvferry.prefill_node.admission import JobAdmission
from kvferry.prefill_node.decode_links import DecodeLinks
from kvferry.prefill_node.handover import HandoverContext
from kvferry.prefill_node.job import LIVE, JobEvent, PrefillJob
from kvferry.prefill_node.jobs import JobTable
from kvferry.prefill_node.transfer import HandoverManager


@dataclass(slots=True)
class PrefillRole:
    """All requests of the prefill role of one process."""

    context: RoleContext
    local_decode: LocalDecode | None
    """The decode role of the same process, if it has one."""
    decodes: DecodeLinks
    name: RoleName = "prefill"
    jobs: JobTable = field(init=False)
    _admission: JobAdmission = field(init=False)
    _handovers: HandoverManager = field(init=False)
    _transfer_no: int = 0
    """Highest number given out."""
    _last_heartbeat: float = -1e9

    def __post_init__(self) -> None:
        context = self.context
        self.jobs = JobTable(context.scheduler)
        self._admission = JobAdmission(context, self.jobs, self.decodes, self.local_decode)
        shared = HandoverContext(
            self_id=context.self_id,
            shape=context.shape,
            timers=context.timers,
            limits=context.limits,
            new_transfer_no=self._new_transfer_no,
            peers=self.decodes,
        )
        self._handovers = HandoverManager(shared, self.jobs, context.scheduler, self.decodes, context.num_blocks)

    def _new_transfer_no(self) -> int:
        self._transfer_no += 1
        return self._transfer_no

    # -- messages of workers

    def handles(self, message: Message) -> bool:
        """Workers send Jobs; answers of decode nodes come over the role's own links."""
        return isinstance(message, Job)

    def on_message(self, client: Client, message: Message, now: float) -> list[Action]:
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
            if job.worker == client.incarnation and job.message.attempt <= message.attempt:
                actions += self.jobs.drop(job, now)
        return actions

    # -- the wanted set

    def on_heartbeat(self, client: Client, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in self.jobs.of_worker(client.incarnation):
            if not client.wants(job.message.placement_no, *job.attempt_key):
                actions += self.jobs.drop(job, now)
        for entry in client.wanted.values():
            known = self.jobs.by_attempt.get(AttemptKey(entry.request_id, entry.attempt))
            if entry.expected and known is not None and known.worker == client.incarnation:
                actions += replies.state_reply(known, entry.next_index, entry.resend)
        return actions

    def on_client_lost(self, client: Client, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in self.jobs.of_worker(client.incarnation):
            actions += self.jobs.drop(job, now)
        return actions

    def knows(self, request_id: RequestId, attempt: int) -> bool:
        job = self.jobs.by_attempt.get(AttemptKey(request_id, attempt))
        return job is not None and not job.delisted

    # -- scheduler

    def may_start(self, spec: SequenceSpec) -> bool:
        """Bound the computed tokens without a grant. One job may always run; one that decodes here needs no grant."""
        if spec.mode == "decode":
            return True
        left = spec.sampling.max_new_tokens - (len(spec.token_ids) - spec.num_prompt_tokens)
        if left <= 1:
            return True
        ungranted = self.jobs.ungranted_blocks
        want = -(-(len(spec.token_ids) + 1) // self.context.block_size)
        return (
            ungranted == 0 or ungranted + want <= self.context.limits.unreserved_prompt_share * self.context.num_blocks
        )

    def wants_layers(self, batch: StepBatch) -> bool:
        return self._handovers.wants_layers(batch)

    def owns(self, seq_id: int) -> bool:
        return seq_id in self.jobs.by_seq

    def on_scheduler(self, event: SchedulerEvent, now: float) -> list[Action]:
        job = self.jobs.by_seq[event.seq_id]
        match event:
            case Started(num_cached_tokens=cached):
                return self._handovers.on_started(job, cached, now)
            case ChunkComputed(token_start=start, token_end=end):
                return self._handovers.on_chunk(job, start, end, now)
            case Sampled(token_id=token_id, index=index):
                self._note_first_token(job, token_id, index)
                if job.stays and self.context.scheduler.status(event.seq_id) is SequenceStatus.DECODING:
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
            case _:
                assert_never(event)
        return []

    def _note_first_token(self, job: PrefillJob, token_id: int, index: int) -> None:
        """The token is sent with the next event: Prefilled, or Finished when it ends the request."""
        job.first_token = FirstToken(
            request_id=job.message.request_id,
            attempt=job.message.attempt,
            index=index,
            token_id=token_id,
            cached_tokens=job.cached_tokens,
        )

    def _continue_here(self, job: PrefillJob, first: Sampled, now: float) -> list[Action]:
        """Its prompt is computed and its sequence decodes already: the decode role adopts it."""
        assert self.local_decode is not None
        assert job.first_token is not None
        computed = LocalHandover(
            key=TransferKey(job.message.request_id, job.message.attempt, 0, self.context.self_id, self.context.self_id),
            worker=job.worker,
            placement_no=job.message.placement_no,
            sequence=job.sequence,
            deadline=job.deadline,
            output_token_ids=job.message.spec.output_token_ids,
            seq_id=first.seq_id,
            token_id=first.token_id,
            index=first.index,
            cached_tokens=job.cached_tokens,
        )
        self.jobs.detach(job)
        self.jobs.forget(job)
        return [
            Send(job.worker, job.first_token),
            Send(job.worker, replies.handed_over_to(job.message, self.context.self_id)),
            *self.local_decode.adopt(computed, now),
        ]

    def _on_finished(self, job: PrefillJob, reason: str, now: float) -> list[Action]:
        self.jobs.detach(job)
        if job.has_ended:
            return []
        job.machine.move(JobEvent.FINISH, now)
        assert job.first_token is not None
        finish = "stop" if reason == "stop" else "length"
        job.first_token = msgspec.structs.replace(job.first_token, finish=finish)
        return [*self.jobs.abort_sender(job, now), Send(job.worker, job.first_token)]

    # -- links, transport, time

    def on_event(self, event: Event, now: float) -> list[Action]:
        match event:
            case PieceSent() | PiecesStopped() | KvSendFailed():
                return self._handovers.on_transport(event, now)
            case LayersDone(step_id, layers):
                return self._handovers.on_layers(step_id, layers, now)
            case Received() | LinkConnected() | LinkClosed() | ProbeAnswered():
                return self._handovers.on_link_event(event, now)
            case _:
                return []  # of the decode role

    def tick(self, now: float) -> list[Action]:
        actions = self._handovers.on_link_event(Tick(), now)
        for job in self.jobs:
            actions += self._handovers.tick_job(job, now)
        if now - self._last_heartbeat >= self.context.timers.heartbeat_s:
            self._last_heartbeat = now
            actions += self.decodes.heartbeats(self.jobs.open_senders(), self._transfer_no)
        return actions

    def flush(self, now: float) -> list[Action]:
        return self._handovers.give_slots(now)

    # -- the end

    def drain(self, now: float) -> list[Action]:
        self._admission.draining = True
        return []

    def preempt_all(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in self.jobs:
            if job.state in LIVE and not job.delisted:
                actions += self.jobs.abort_sender(job, now)
                self.jobs.release(job)
                job.machine.move(JobEvent.PREEMPT, now)
                actions.append(replies.preempted(job))
        return actions

    def is_quiescent(self) -> bool:
        return not self.jobs.by_attempt and not self.jobs.by_seq

    def check_invariants(self) -> None:
        """Raises InvariantError when the indexes disagree."""
        self.jobs.check_invariants()


def make_prefill_role(context: RoleContext, local_decode: LocalDecode | None = None) -> PrefillRole:
    """The role of a prefill node; `local_decode` is the decode role of the same process, if it has one."""
    hello = Hello(kind="prefill", name=context.name, compatibility=context.compatibility)
    decodes = DecodeLinks(LinkTable(hello, context.timers), context.staging_host)
    return PrefillRole(context, local_decode, decodes)
