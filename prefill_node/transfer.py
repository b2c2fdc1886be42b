"""A prompt under way that others go before: its reservation does not wait with it. Pure. Protocol rule 20.

The scheduler gives the prompts of better classes, then the older ones, all of a step. What gets nothing pauses: it
keeps its blocks and what is computed, but room on a decode node that it cannot use soon is for those that can.

From the first chunk to the hand-over: asks, pushes, commits through each job's `HandoverSender`. Pure.

Follows what becomes of each sender: HandedOver, or HandoverFailed with the KV held a while. Gives out transfer slots.
"""

from dataclasses import dataclass, field

from kvferry.common.base.ids import (
    AttemptKey,
    Incarnation,
    TransferKey,
)
from kvferry.common.cluster.actions import (
    Action,
    Send,
)
from kvferry.common.cluster.events import (
    Event,
    KvSendFailed,
    PieceSent,
    PiecesStopped,
)
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.messages import Reserve
from kvferry.common.scheduling.events import Prefilled
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.step import StepBatch
from kvferry.prefill_node import job as reports
from kvferry.prefill_node.decode_links import DecodeLinks
from kvferry.prefill_node.handover import (
    HandoverSender,
    NextToken,
)
from kvferry.prefill_node.handover_table import SendState
from kvferry.prefill_node.job import (
    JobEvent,
    JobState,
    PrefillJob,
)
from kvferry.prefill_node.jobs import (
    LIVE,
    JobTable,
)

RELEASES_AT_ONCE = 1
"""After so many pauses room is asked for as soon as a prompt goes on."""


@dataclass(slots=True)
class ReservationPauses:
    """Watches jobs that are being computed."""

    scheduler: Scheduler
    paused_reservation_s: float

    def tick(self, job: PrefillJob, now: float) -> list[Action]:
        """Give the reservation back of a job that has had no chunk under way for too long."""
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

    def go_on(self, job: PrefillJob, end: int, now: float) -> list[Action]:
        """Positions up to `end` are computed or being computed: ask for room anew if it was given back.

        Whoever asks anew sends all its KV anew. A prompt that pauses again and again asks when its last chunk is there.
        """
        job.paused_since = None
        if job.sender is None or job.sender.state is not SendState.IDLE:
            return []
        if job.num_releases > RELEASES_AT_ONCE and end < job.spec.num_known:
            return []
        return job.sender.ask(now)


PLANS_KEPT = 8
"""More than there can be steps in flight."""


@dataclass(slots=True)
class HandoverManager:
    """The hand-overs of all jobs."""

    self_id: Incarnation
    jobs: JobTable
    scheduler: Scheduler
    decodes: DecodeLinks
    timers: Timers
    limits: Limits
    shape: KvShape
    num_blocks: int
    transfer_no: int = 0
    """Highest number given out."""
    _pauses: ReservationPauses = field(init=False)
    _plans: dict[int, StepBatch] = field(default_factory=dict)
    """Steps in flight whose layers are reported."""

    def __post_init__(self) -> None:
        self._pauses = ReservationPauses(self.scheduler, self.timers.paused_reservation_s)

    # -- what the engine does

    def on_started(self, job: PrefillJob, cached: int, now: float) -> list[Action]:
        """It has blocks for all its tokens: ask for room in the same moment."""
        assert job.seq_id is not None
        job.machine.move(JobEvent.START, now)
        job.cached_tokens = min(cached, len(job.job.prompt_token_ids))
        table = self.scheduler.block_table(job.seq_id)
        job.num_blocks = len(table)
        if not job.needs_handover:
            return []
        job.sender = self._new_sender(job, now)
        job.sender.block_table = table
        actions = job.sender.progress(0, cached, self.shape.num_layers, now)
        return actions + self.follow(job, job.sender.ask(now), now)

    def on_chunk(self, job: PrefillJob, start: int, end: int, now: float) -> list[Action]:
        """Positions start .. end - 1 have their KV in all layers."""
        if job.sender is None:
            return []
        actions = job.sender.progress(start, end, self.shape.num_layers, now)
        return actions if job.is_record else actions + self.follow(job, self._pauses.go_on(job, end, now), now)

    def on_prefilled(self, job: PrefillJob, event: Prefilled, now: float) -> list[Action]:
        """All is computed: the first token goes out, and the Commit when every piece is given."""
        job.machine.move(JobEvent.PREFILLED, now)
        if job.is_record:
            return []
        actions: list[Action] = [] if job.first_token is None else [Send(job.worker, job.first_token)]
        if job.sender is None:
            return actions
        token = NextToken(event.token_id, event.index, event.num_tokens, job.cached_tokens)
        return actions + self.follow(job, job.sender.token_known(token, now), now)

    def wants_layers(self, plan: StepBatch) -> bool:
        """Whether something of this step is to be ferried."""
        jobs = [self.jobs.by_seq.get(part.seq_id) for part in plan.scheduled]
        wanted = any(job is not None and job.sender is not None for job in jobs)
        if wanted:
            self._plans[plan.step_id] = plan
            self._plans.pop(plan.step_id - PLANS_KEPT, None)
        return wanted

    def on_layers(self, step_id: int, layers: int, now: float) -> list[Action]:
        """The step has completed that many layers: their pieces may go."""
        plan = self._plans.get(step_id)
        actions: list[Action] = []
        for part in plan.scheduled if plan is not None else ():
            job = self.jobs.by_seq.get(part.seq_id)
            if job is not None and job.sender is not None and not job.is_record:
                end = part.start_position + len(part.token_ids)
                actions += job.sender.progress(part.start_position, end, layers, now)
                actions += self.follow(job, self._pauses.go_on(job, end, now), now)
                self.jobs.sync_pin(job)
        if layers >= self.shape.num_layers:
            self._plans.pop(step_id, None)
        return actions

    def _new_sender(self, job: PrefillJob, now: float) -> HandoverSender:
        message = job.job
        reserve = Reserve(
            key=TransferKey(message.request_id, message.attempt, 0, self.self_id, Incarnation("")),
            transfer_no=0,
            placement_no=message.placement_no,
            worker=job.worker,
            prompt_token_ids=message.prompt_token_ids,
            output_token_ids=message.output_token_ids,
            sampling=message.sampling,
            priority=message.priority,
            remaining_ms=0,
            waited_ms=0,
            times_preempted=message.times_preempted,
            trace=message.trace,
        )
        return HandoverSender(
            self_id=self.self_id,
            reserve=reserve,
            candidates=[candidate for candidate in message.candidates if candidate.incarnation != self.self_id],
            shape=self.shape,
            timers=self.timers,
            limits=self.limits,
            new_transfer_no=self._new_transfer_no,
            peers=self.decodes,
            deadline=job.deadline - self.timers.deadline_grace_s,
            accepted_at=job.spec.accepted_at,
        )

    def _new_transfer_no(self) -> int:
        self.transfer_no += 1
        return self.transfer_no

    # -- what becomes of a hand-over

    def follow(self, job: PrefillJob, actions: list[Action], now: float) -> list[Action]:
        """After anything was done with its sender: do what the sender's state asks for."""
        self.jobs.sync_pin(job)
        sender = job.sender
        if sender is None or job.is_record:
            return actions
        if sender.state is SendState.COMMITTED and job.state is JobState.COMPUTED:
            job.machine.move(JobEvent.HAND_OVER, now)
            self._keep_blocks(job, now)
            self.jobs.release_if_complete(job)
            return [*actions, reports.handed_over(job)]
        if sender.state is SendState.FAILED:
            return actions + self.fail(job, sender.failure, now, commit_sent=sender.commit_sent)
        return actions

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
        """It goes no further here; its KV is held a while if there is room for that."""
        actions = self.jobs.abort_sender(job, now)
        held = job.seq_id is not None and retryable and self._may_retain(job)
        if not held:
            self.jobs.release(job)
        job.until = now + self.timers.retain_s
        job.machine.move(JobEvent.FAIL, now)
        message = reports.failed(job.job, reason, detail=detail, retryable=retryable)
        job.failure = reports.failed_with(job, message, held=held, commit_sent=commit_sent)
        return [*actions, Send(job.worker, job.failure)]

    def _may_retain(self, job: PrefillJob) -> bool:
        if job.state is JobState.QUEUED or job.stays:  # the scheduler would go on with one that stays
            return False
        return self.jobs.retained_blocks + job.num_blocks <= self.limits.retained_share * self.num_blocks

    def _keep_blocks(self, job: PrefillJob, now: float) -> None:
        """After the hand-over pieces may be asked for again: for so long after anything was heard or sent of them."""
        if job.state is JobState.HANDED:
            job.until = now + 2 * self.timers.piece_idle_timeout_s

    # -- what transport, links and decode nodes say

    def on_transport(self, event: PieceSent | PiecesStopped | KvSendFailed, now: float) -> list[Action]:
        """What became of pieces. A job that nobody wants any more goes with the last of them."""
        job = self.jobs.by_attempt.get(AttemptKey(event.key.request_id, event.key.attempt))
        if job is None or job.sender is None:
            return []
        actions: list[Action] = []
        match event:
            case PieceSent(key, number):
                actions = job.sender.on_sent(key, number, now)
            case PiecesStopped(key):
                actions = job.sender.on_stopped(key)
            case KvSendFailed(key, _):
                actions = job.sender.on_send_failed(key, now)
        actions = self.follow(job, actions, now)
        self._keep_blocks(job, now)
        self.jobs.release_if_complete(job)
        return actions + self.jobs.drop(job, now) if job.delisted else actions

    def on_link_event(self, event: Event, now: float) -> list[Action]:
        """Links came or went, or a decode node answered."""
        update = self.decodes.on_event(event, now)
        actions = update.actions
        for peer in update.up:
            for _, sender in self.jobs.aimed_at(peer):
                actions += sender.on_peer_up(now)
        for peer in update.lost:
            for job, sender in self.jobs.aimed_at(peer):
                actions += self.follow(job, sender.on_peer_lost(now), now)
                self.jobs.release_if_complete(job)
        if update.key is None or update.message is None:
            return actions
        concerned = self.jobs.by_attempt.get(AttemptKey(update.key.request_id, update.key.attempt))
        if concerned is None or concerned.sender is None:
            return actions + self.decodes.unwanted(update.message)
        actions += self.follow(concerned, self.decodes.dispatch(concerned.sender, update.message, now), now)
        self._keep_blocks(concerned, now)
        self.jobs.release_if_complete(concerned)
        return actions

    # -- time

    def tick_job(self, job: PrefillJob, now: float) -> list[Action]:
        """Repeat, give up, let go."""
        if job.delisted:
            if not job.pinned:
                self.jobs.forget(job)
            return []
        if job.state in LIVE and now > job.deadline:
            return self.fail(job, "deadline", now, detail="deadline")
        if job.state in LIVE and job.sender is not None:
            up = job.sender.key is not None and self.decodes.is_up(job.sender.key.decode)
            repeated = job.sender.tick(now, target_up=up)
            return self.follow(job, repeated + self._pauses.tick(job, now), now)
        waits = job.state is JobState.HANDED and job.pinned
        if job.is_record and job.seq_id is not None and now > job.until and not waits:
            self.jobs.release(job)
        return []

    def give_slots(self, now: float) -> list[Action]:
        """Transfers under way are bounded, for each decode node and in all; the oldest jobs first."""
        waiting = [job for job in self.jobs.by_seq.values() if job.sender is not None and job.sender.wants_slot]
        if not waiting:
            return []
        busy: dict[Incarnation, int] = {}
        for job in self.jobs.by_attempt.values():
            sender = job.sender
            if sender is not None and sender.key is not None and sender.is_sending:
                busy[sender.key.decode] = busy.get(sender.key.decode, 0) + 1
        actions: list[Action] = []
        for job in waiting:
            assert job.sender is not None
            assert job.sender.key is not None
            peer = job.sender.key.decode
            if sum(busy.values()) >= self.limits.transfers_per_node:
                break
            if busy.get(peer, 0) < self.limits.transfers_per_peer:
                busy[peer] = busy.get(peer, 0) + 1
                actions += self.follow(job, job.sender.give_slot(now), now)
        return actions
