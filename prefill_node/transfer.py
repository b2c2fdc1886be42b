"""All hand-overs of a prefill node: from the first chunk of a prompt until a decode node owns the request. Pure.

Starts a `HandoverSender` for each job, feeds it what the engine, the transport and decode nodes say, and decides what
its states mean for the job (`_on_state`): handed over, complete, or failed with the KV retained for a while.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from kvferry.common.base.ids import AttemptKey, Incarnation
from kvferry.common.cluster.actions import Action, Send
from kvferry.common.cluster.events import KvSendFailed, PieceSent, PiecesStopped
from kvferry.common.cluster.links import LinkInput
from kvferry.common.scheduling.events import Prefilled
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.step import StepBatch
from kvferry.prefill_node import job as replies
from kvferry.prefill_node.decode_links import DecodeLinks, release_unwanted
from kvferry.prefill_node.handover import Answer, HandoverContext, HandoverSender, NextToken
from kvferry.prefill_node.handover_table import SendState
from kvferry.prefill_node.job import LIVE, JobEvent, JobState, PrefillJob
from kvferry.prefill_node.jobs import JobTable

STEPS_KEPT = 8
"""More than there can be steps in flight."""
RELEASES_BEFORE_LAST_CHUNK = 1
"""A prompt that paused more often asks for a reservation only with its last chunk: each new one sends all KV again."""

TransportEvent = PieceSent | PiecesStopped | KvSendFailed


@dataclass(slots=True)
class ReservationPauses:
    """Releases the decode reservation of a prompt that higher-priority prompts have paused. Protocol rule 20.

    The scheduler gives a step's tokens to better classes first, then to older prompts. A prompt that gets none keeps
    its blocks and what is computed, but not a reservation that it cannot use soon and others could.
    """

    scheduler: Scheduler
    paused_reservation_s: float

    def tick(self, job: PrefillJob, now: float) -> list[Action]:
        """Release the reservation of a job that has had no chunk in a step for too long."""
        if job.state is not JobState.COMPUTING or job.sender is None or job.seq_id is None:
            return []
        if self.scheduler.is_in_step(job.seq_id):
            job.paused_since = None
        elif job.paused_since is None:
            job.paused_since = now
        elif now - job.paused_since > self.paused_reservation_s:
            released = job.sender.release(now)
            job.num_releases += bool(released)
            return released
        return []

    def resume(self, job: PrefillJob, end: int, now: float) -> list[Action]:
        """Positions below `end` are computed or being computed: ask again for a reservation that was released."""
        job.paused_since = None
        if job.sender is None or job.sender.state is not SendState.IDLE:
            return []
        if job.num_releases > RELEASES_BEFORE_LAST_CHUNK and end < job.sequence.num_known:
            return []
        return job.sender.ask(now)


@dataclass(slots=True)
class HandoverManager:
    """The hand-overs of all jobs."""

    context: HandoverContext
    jobs: JobTable
    scheduler: Scheduler
    decodes: DecodeLinks
    num_blocks: int
    """Of the node's KV cache."""
    _pauses: ReservationPauses = field(init=False)
    _batches: dict[int, StepBatch] = field(default_factory=dict)
    """Steps in flight that report their layers, by step id."""

    def __post_init__(self) -> None:
        self._pauses = ReservationPauses(self.scheduler, self.context.timers.paused_reservation_s)

    # -- the engine

    def on_started(self, job: PrefillJob, cached: int, now: float) -> list[Action]:
        """The job has blocks for all its tokens: ask for a reservation in the same moment."""
        assert job.seq_id is not None
        job.machine.move(JobEvent.START, now)
        job.cached_tokens = min(cached, len(job.message.spec.prompt_token_ids))
        table = self.scheduler.block_table(job.seq_id)
        job.num_blocks = len(table)
        if not job.needs_handover:
            return []
        job.sender = HandoverSender(
            context=self.context,
            job=job.message,
            worker=job.worker,
            deadline=job.deadline - self.context.timers.deadline_grace_s,
            accepted_at=job.sequence.accepted_at,
            block_table=table,
            on_state=partial(self._on_state, job),
            on_reading=partial(self.jobs.on_reading, job),
        )
        cached_part = job.sender.progress(0, cached, self.context.shape.num_layers, now)
        return [*cached_part, *job.sender.ask(now)]

    def on_chunk(self, job: PrefillJob, start: int, end: int, now: float) -> list[Action]:
        """Positions start .. end - 1 have their KV in all layers."""
        return self._progress(job, start, end, self.context.shape.num_layers, now)

    def on_prefilled(self, job: PrefillJob, event: Prefilled, now: float) -> list[Action]:
        """The prompt is computed: send the first token, and the Commit as soon as every piece is given."""
        job.machine.move(JobEvent.PREFILLED, now)
        if job.has_ended:
            return []
        actions: list[Action] = [] if job.first_token is None else [Send(job.worker, job.first_token)]
        if job.sender is not None:
            token = NextToken(event.token_id, event.num_tokens, job.cached_tokens)
            actions += job.sender.token_known(token, now)
        return actions

    def wants_layers(self, batch: StepBatch) -> bool:
        """Whether this step computes KV that is to be transferred."""
        jobs = [self.jobs.by_seq.get(part.seq_id) for part in batch.scheduled]
        wanted = any(job is not None and job.sender is not None for job in jobs)
        if wanted:
            self._batches[batch.step_id] = batch
            self._batches.pop(batch.step_id - STEPS_KEPT, None)
        return wanted

    def on_layers(self, step_id: int, layers: int, now: float) -> list[Action]:
        """The step has completed that many layers: their pieces may go."""
        batch = self._batches.get(step_id)
        actions: list[Action] = []
        for part in batch.scheduled if batch is not None else ():
            job = self.jobs.by_seq.get(part.seq_id)
            if job is not None:
                end = part.start_position + len(part.token_ids)
                actions += self._progress(job, part.start_position, end, layers, now)
        if layers >= self.context.shape.num_layers:
            self._batches.pop(step_id, None)
        return actions

    def _progress(self, job: PrefillJob, start: int, end: int, layers: int, now: float) -> list[Action]:
        if job.sender is None or job.has_ended:
            return []
        return [*job.sender.progress(start, end, layers, now), *self._pauses.resume(job, end, now)]

    # -- what a hand-over's state means for its job

    def _on_state(self, job: PrefillJob, state: SendState, now: float) -> list[Action]:
        if state is SendState.FAILED:
            assert job.sender is not None
            return self.fail(job, job.sender.failure, now, commit_sent=job.sender.commit_sent)
        if state is SendState.COMMITTED and job.state is JobState.COMPUTED:
            job.machine.move(JobEvent.HAND_OVER, now)
            return [replies.handed_over(job)]
        if state is SendState.COMPLETE and job.state is JobState.HANDED:
            self.jobs.release(job)
        return []

    def fail(
        self,
        job: PrefillJob,
        reason: str,
        now: float,
        *,
        detail: str = "",
        retryable: bool = True,
        commit_sent: bool = False,
    ) -> list[Action]:
        """The attempt ends here; its KV is retained for a while if there is room for that."""
        actions = self.jobs.abort_sender(job, now)
        retained = job.seq_id is not None and retryable and self._may_retain(job)
        if not retained:
            self.jobs.release(job)
        job.retained_until = now + self.context.timers.retain_s
        job.machine.move(JobEvent.FAIL, now)
        message = replies.failed(job.message, reason, detail=detail, retryable=retryable)
        job.failure = replies.failed_with(job, message, retained=retained, commit_sent=commit_sent)
        return [*actions, Send(job.worker, job.failure)]

    def _may_retain(self, job: PrefillJob) -> bool:
        if job.state is JobState.QUEUED or job.stays:  # the scheduler would continue one that decodes here
            return False
        most_blocks = self.context.limits.retained_share * self.num_blocks
        return self.jobs.retained_blocks + job.num_blocks <= most_blocks

    # -- transport, links and decode nodes

    def on_transport(self, event: TransportEvent, now: float) -> list[Action]:
        """The transport read pieces, stopped, or failed."""
        job = self.jobs.by_attempt.get(AttemptKey(event.key.request_id, event.key.attempt))
        if job is None or job.sender is None:
            return []
        match event:
            case PieceSent(key, number):
                return job.sender.on_sent(key, number, now)
            case PiecesStopped(key):
                return job.sender.on_stopped(key, now)
            case KvSendFailed(key, _):
                return job.sender.on_send_failed(key, now)
            case _:
                assert_never(event)

    def on_link_event(self, event: LinkInput, now: float) -> list[Action]:
        """Links came up or were lost, or a decode node answered."""
        update = self.decodes.handle(event, now)
        actions = update.actions
        if update.up is not None and update.up.peer is not None:
            for _, sender in self.jobs.aimed_at(update.up.peer):
                actions += sender.on_peer_up(now)
        for peer in update.lost:
            for _, sender in self.jobs.aimed_at(peer):
                actions += sender.on_peer_lost(now)
        if update.link is not None and isinstance(update.message, Answer):
            actions += self._on_answer(update.link.peer, update.message, now)
        return actions

    def _on_answer(self, peer: Incarnation | None, message: Answer, now: float) -> list[Action]:
        if message.key.decode != peer:
            return []  # no node answers for another one
        job = self.jobs.by_attempt.get(AttemptKey(message.key.request_id, message.key.attempt))
        if job is None or job.sender is None:
            return release_unwanted(message)
        return job.sender.on_answer(message, now)

    # -- time

    def tick_job(self, job: PrefillJob, now: float) -> list[Action]:
        """Repeat messages, give up, release blocks."""
        if job.state in LIVE and not job.delisted:
            if now > job.deadline:
                return self.fail(job, "deadline", now, detail="deadline")
            if job.sender is not None:
                return [*job.sender.tick(now), *self._pauses.tick(job, now)]
        elif job.seq_id is not None and self._is_kept_long_enough(job, now):
            self.jobs.release(job)
        return []

    def _is_kept_long_enough(self, job: PrefillJob, now: float) -> bool:
        """Whether an ended job's blocks may go: no piece is asked for any more, or the retained KV has expired."""
        if job.state is JobState.HANDED and job.sender is not None:
            idle_s = now - job.sender.last_activity
            return not job.pinned and idle_s > 2 * self.context.timers.piece_idle_timeout_s
        return now > job.retained_until

    def give_slots(self, now: float) -> list[Action]:
        """Give transfer slots, which are bounded for each decode node and in all, to the oldest jobs first."""
        waiting = [job.sender for job in self.jobs.by_seq.values() if job.sender is not None and job.sender.wants_slot]
        if not waiting:
            return []
        limits, busy = self.context.limits, self._busy()
        actions: list[Action] = []
        for sender in waiting:
            assert sender.key is not None
            peer = sender.key.decode
            if sum(busy.values()) >= limits.transfers_per_node:
                break
            if busy.get(peer, 0) < limits.transfers_per_peer:
                busy[peer] = busy.get(peer, 0) + 1
                actions += sender.give_slot(now)
        return actions

    def _busy(self) -> dict[Incarnation, int]:
        """Transfers in progress by decode node."""
        busy: dict[Incarnation, int] = {}
        for job in self.jobs.by_attempt.values():
            sender = job.sender
            if sender is not None and sender.key is not None and sender.is_sending:
                busy[sender.key.decode] = busy.get(sender.key.decode, 0) + 1
        return busy
