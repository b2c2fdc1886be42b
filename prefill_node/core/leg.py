"""The prefill leg: computes prompts, sends first tokens, hands requests over. Pure.

The life of a request here:
 1. Job: queued by priority and age, unless its worker's list says that it is not wanted any more.
 2. It starts when blocks for all its tokens are there. In the same moment the best candidate is asked to reserve.
 3. Chunks are computed; pieces of KV go out as soon as there is a grant, layer group by layer group.
 4. The next token is drawn here and goes straight to the worker. If it ends the request, nothing is handed over.
 5. Commit to one candidate; when that owns the request: HandedOver, and the blocks become prefix cache.
 6. No candidate left, or the Commit failed: HandoverFailed; the KV is held a while for the next attempt.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from common.config.protocol import Limits, Timers
from common.errors import InvariantError, RequestInvalidError
from common.ids import Incarnation, PlanKey, RequestId, TransferKey
from common.protocol.messages import (
    Cancel,
    FirstToken,
    Gone,
    HandedOver,
    HandoverFailed,
    Job,
    Message,
    Reserve,
    Role,
)
from common.scheduling.events import (
    ChunkComputed,
    Failed,
    Finished,
    GivenBack,
    Prefilled,
    Sampled,
    SchedulerEvent,
    Started,
)
from common.scheduling.scheduler import Scheduler
from common.scheduling.sequence import SequenceSpec, Status
from common.scheduling.step import StepPlan
from common.state.actions import Action, Send
from common.state.clients import Client
from common.state.events import Event, KvSendFailed, LayersDone, PieceSent, PiecesStopped, Tick
from common.state.handover_send import HandoverSender, KvShape, NextToken, SendState
from prefill_node.core.decode_links import Answer, DecodeLinks
from prefill_node.core.job import JobEvent, JobState, PrefillJob

PLANS_KEPT = 8
"""More than there can be steps in flight."""
CURRENT = (JobState.QUEUED, JobState.COMPUTING, JobState.COMPUTED)


@dataclass(slots=True)
class PrefillLeg:
    """All requests of the prefill role of one process."""

    me: Incarnation
    scheduler: Scheduler
    timers: Timers
    limits: Limits
    shape: KvShape
    decodes: DecodeLinks
    num_blocks: int
    block_size: int
    role: Role = "prefill"
    draining: bool = False
    jobs: dict[PlanKey, PrefillJob] = field(default_factory=dict)
    transfer_no: int = 0
    _by_seq: dict[int, PrefillJob] = field(default_factory=dict)
    _plans: dict[int, StepPlan] = field(default_factory=dict)
    """Steps in flight whose layers are reported."""
    _last_beat: float = -1e9

    # -- messages of workers

    def handles(self, message: Message) -> bool:
        """Job comes from workers; answers of decode nodes come over the leg's own links."""
        return isinstance(message, Job)

    def on_message(self, client: Client, message: Message, now: float) -> list[Action]:
        """See the module's docstring."""
        match message:
            case Job():
                return self._on_job(client, message, now)
            case Cancel():
                return self._on_cancel(client, message, now)
            case _:
                return []

    def _on_job(self, client: Client, message: Job, now: float) -> list[Action]:
        key = PlanKey(message.request_id, message.attempt)
        if key in self.jobs:
            return []
        if not client.wants(message.plan_no, *key):
            gone = Gone(request_id=key.request_id, attempt=key.attempt, reason="lost", detail="not wanted any more")
            return [Send(client.incarnation, gone)]
        reason = self._refusal(message)
        if reason is not None:
            return [Send(client.incarnation, self._failed(message, reason))]
        job = PrefillJob(client.incarnation, message, now + message.remaining_ms / 1000 + self.timers.deadline_grace_s)
        try:
            seq_id, actions = self._enqueue(job, now)
        except RequestInvalidError as error:
            failed = self._failed(message, "invalid", detail=str(error), retryable=False)
            return [Send(client.incarnation, failed)]
        job.seq_id = seq_id
        self.jobs[key] = self._by_seq[seq_id] = job
        for candidate in message.candidates:
            actions += self.decodes.know(candidate, now)
        return actions

    def _refusal(self, message: Job) -> str | None:
        if self.draining:
            return "draining"
        if message.attempt > 1:
            return None  # re-plans are never refused by admission
        load = self.scheduler.load()
        full = self.scheduler.num_waiting >= self.limits.queued_requests
        crowded = load.waiting_tokens > 0 and load.waiting_tokens + len(message.prompt_token_ids) > (
            self.limits.queued_tokens
        )
        return "overloaded" if full or crowded else None

    def _enqueue(self, job: PrefillJob, now: float) -> tuple[int, list[Action]]:
        """Queue it; an earlier attempt that holds KV here gives its blocks to it."""
        message = job.job
        spec = SequenceSpec(
            token_ids=message.prompt_token_ids + message.output_token_ids,
            num_prompt_tokens=len(message.prompt_token_ids),
            sampling=message.sampling,
            priority=message.priority,
            accepted_at=now - message.waited_ms / 1000,
            mode="prefill",
            times_preempted=message.times_preempted,
        )
        actions: list[Action] = []
        for earlier in [j for j in self.jobs.values() if j.job.request_id == message.request_id]:
            if earlier.job.attempt < message.attempt and earlier.seq_id is not None:
                actions += self._abort_sender(earlier, now)
                if earlier.pinned:
                    actions += self._drop(earlier, now)
                    continue
                seq_id = self.scheduler.take_over(earlier.seq_id, spec, now)
                self._detach(earlier)
                self._forget(earlier)
                return seq_id, actions
        return self.scheduler.add(spec, now), actions

    def _on_cancel(self, client: Client, message: Cancel, now: float) -> list[Action]:
        actions: list[Action] = []
        for job in [j for j in self.jobs.values() if j.job.request_id == message.request_id]:
            if job.worker == client.incarnation and job.job.attempt <= message.attempt:
                actions += self._drop(job, now)
        return actions

    # -- lists

    def on_list(self, client: Client, now: float) -> list[Action]:
        """Free what the worker's list no longer has; answer what it expects."""
        actions: list[Action] = []
        for job in list(self.jobs.values()):
            if job.worker == client.incarnation and not client.wants(job.job.plan_no, *job.plan_key):
                actions += self._drop(job, now)
        for entry in client.entries.values():
            known = self.jobs.get(PlanKey(entry.request_id, entry.attempt))
            if entry.expected and known is not None and known.worker == client.incarnation:
                actions += self._tell_state(known, entry.next_index, entry.resend)
        return actions

    def _tell_state(self, job: PrefillJob, next_index: int, resend: bool) -> list[Action]:
        if job.state is JobState.HANDED:
            return [self._handed_over(job)]
        if job.state is JobState.FAILED and job.failure is not None:
            return [Send(job.worker, job.failure)]
        if job.state is JobState.GIVEN_BACK:
            return [self._gone(job)]
        missed = job.first_token is not None and job.first_token.index >= next_index
        if missed and (resend or job.state is JobState.FINISHED):
            assert job.first_token is not None
            return [Send(job.worker, job.first_token)]
        return []

    def on_client_lost(self, client: Client, now: float) -> list[Action]:
        """A worker loses all it had."""
        actions: list[Action] = []
        for job in [j for j in self.jobs.values() if j.worker == client.incarnation]:
            actions += self._drop(job, now)
        return actions

    def knows(self, request_id: RequestId, attempt: int) -> bool:
        """Whether anything is held or recorded for this attempt."""
        job = self.jobs.get(PlanKey(request_id, attempt))
        return job is not None and not job.delisted

    # -- scheduler

    def may_start(self, spec: SequenceSpec) -> bool:
        """Computed tokens without a grant are bounded; one job may always run."""
        left = spec.sampling.max_new_tokens - (len(spec.token_ids) - spec.num_prompt_tokens)
        if left <= 1:
            return True
        held = sum(job.num_blocks for job in self._by_seq.values() if job.ungranted)
        want = -(-(len(spec.token_ids) + 1) // self.block_size)
        return held == 0 or held + want <= self.limits.ungranted_share * self.num_blocks

    def wants_layers(self, plan: StepPlan) -> bool:
        """Report layers when something of this step is to be ferried."""
        wanted = any(
            (job := self._by_seq.get(part.seq_id)) is not None and job.sender is not None for part in plan.scheduled
        )
        if wanted:
            self._plans[plan.step_id] = plan
            self._plans.pop(plan.step_id - PLANS_KEPT, None)
        return wanted

    def on_scheduler(self, event: SchedulerEvent, now: float) -> list[Action]:
        """What became of a job's sequence."""
        job = self._by_seq.get(event.seq_id)
        if job is None:
            return []
        actions = self._on_sequence(job, event, now)
        self._sync_pin(job)
        return actions

    def _on_sequence(self, job: PrefillJob, event: SchedulerEvent, now: float) -> list[Action]:
        match event:
            case Started(num_cached_tokens=cached):
                return self._on_started(job, cached, now)
            case ChunkComputed(token_start=start, token_end=end) if job.sender is not None:
                return job.sender.progress(start, end, self.shape.num_layers, now)
            case Sampled(token_id=token_id, index=index):
                return self._on_sampled(job, token_id, index)
            case Prefilled():
                return self._on_prefilled(job, event, now)
            case Finished(reason=reason):
                return self._on_finished(job, reason, now)
            case Failed(why=why):
                self._detach(job)
                return self._fail(job, "generation", now, detail=why, retryable=False)
            case GivenBack():
                self._detach(job)
                return self._fail(job, "lost", now, detail="preempted")
            case _:
                return []

    def _on_started(self, job: PrefillJob, cached: int, now: float) -> list[Action]:
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
        return actions + self._after_sender(job, job.sender.ask(now), now)

    def _new_sender(self, job: PrefillJob, now: float) -> HandoverSender:
        message = job.job
        reserve = Reserve(
            key=TransferKey(message.request_id, message.attempt, 0, self.me, Incarnation("")),
            transfer_no=0,
            plan_no=message.plan_no,
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
            me=self.me,
            reserve=reserve,
            candidates=[c for c in message.candidates if self.decodes.may_live(c)],
            shape=self.shape,
            timers=self.timers,
            limits=self.limits,
            new_transfer_no=self._new_transfer_no,
            deadline=job.deadline - self.timers.deadline_grace_s,
            accepted_at=now - message.waited_ms / 1000,
        )

    def _new_transfer_no(self) -> int:
        self.transfer_no += 1
        return self.transfer_no

    def _on_sampled(self, job: PrefillJob, token_id: int, index: int) -> list[Action]:
        message = FirstToken(
            request_id=job.job.request_id,
            attempt=job.job.attempt,
            index=index,
            token_id=token_id,
            cached_tokens=job.cached_tokens,
        )
        job.first_token = message
        # One that ends the request is sent by `_on_finished`, with its finish reason.
        return []

    def _on_prefilled(self, job: PrefillJob, event: Prefilled, now: float) -> list[Action]:
        job.machine.move(JobEvent.PREFILLED, now)
        actions: list[Action] = []
        if job.first_token is not None and not job.is_record:
            actions.append(Send(job.worker, job.first_token))
        if job.sender is None or job.is_record:
            return actions
        token = NextToken(event.token_id, event.index, event.num_tokens, job.cached_tokens)
        return actions + self._after_sender(job, job.sender.token_known(token, now), now)

    def _on_finished(self, job: PrefillJob, reason: str, now: float) -> list[Action]:
        self._detach(job)
        if job.is_record:
            return []
        job.machine.move(JobEvent.FINISH, now)
        assert job.first_token is not None
        finish = "stop" if reason == "stop" else "length"
        job.first_token = msgspec.structs.replace(job.first_token, finish=finish)
        return [*self._abort_sender(job, now), Send(job.worker, job.first_token)]

    # -- hand-over

    def _after_sender(self, job: PrefillJob, actions: list[Action], now: float) -> list[Action]:
        """Follow what the sender's state became."""
        self._sync_pin(job)
        sender = job.sender
        if sender is None or job.is_record:
            return actions
        if sender.state is SendState.COMMITTED and job.state is JobState.COMPUTED:
            job.machine.move(JobEvent.HAND_OVER, now)
            job.until = now + 2 * self.timers.piece_idle_s
            self._release_if_complete(job)
            return [*actions, self._handed_over(job)]
        if sender.state is SendState.FAILED:
            return actions + self._fail(job, sender.failure, now, commit_sent=sender.commit_sent)
        return actions

    def _release_if_complete(self, job: PrefillJob) -> None:
        """The decode node has every piece: the blocks become prefix cache."""
        if job.state is JobState.HANDED and job.sender is not None and job.sender.complete:
            self._let_go(job)

    def _fail(
        self,
        job: PrefillJob,
        reason: str,
        now: float,
        *,
        detail: str = "",
        retryable: bool = True,
        commit_sent: bool = False,
    ) -> list[Action]:
        actions = self._abort_sender(job, now)
        held = job.seq_id is not None and retryable and self._may_hold(job)
        if not held:
            self._let_go(job)
        job.until = now + self.timers.hold_s
        job.machine.move(JobEvent.FAIL, now)
        job.failure = self._failed(job.job, reason, detail=detail, retryable=retryable)
        key = job.sender.key if job.sender is not None else None
        decode = key.decode if key is not None else None
        job.failure = msgspec.structs.replace(job.failure, held=held, commit_sent=commit_sent, decode=decode)
        return [*actions, Send(job.worker, job.failure)]

    def _may_hold(self, job: PrefillJob) -> bool:
        held = sum(j.num_blocks for j in self._by_seq.values() if j.state is JobState.FAILED)
        return job.state is not JobState.QUEUED and held + job.num_blocks <= self.limits.held_share * self.num_blocks

    def _failed(self, message: Job, reason: str, *, detail: str = "", retryable: bool = True) -> HandoverFailed:
        return HandoverFailed(
            request_id=message.request_id, attempt=message.attempt, reason=reason, detail=detail, retryable=retryable
        )

    def _handed_over(self, job: PrefillJob) -> Send:
        assert job.sender is not None
        assert job.sender.key is not None
        handed = HandedOver(request_id=job.job.request_id, attempt=job.job.attempt, decode=job.sender.key.decode)
        return Send(job.worker, handed)

    def _gone(self, job: PrefillJob) -> Send:
        return Send(job.worker, Gone(request_id=job.job.request_id, attempt=job.job.attempt, reason="given_back"))

    def on_event(self, event: Event, now: float) -> list[Action]:
        """Answers of decode nodes, links, the transport, layers."""
        match event:
            case PieceSent(key, number):
                return self._with_job(key, now, lambda sender: sender.on_sent(key, number))
            case PiecesStopped(key):
                return self._with_job(key, now, lambda sender: sender.on_stopped(key))
            case KvSendFailed(key, _):
                return self._with_job(key, now, lambda sender: sender.on_send_failed(key, now))
            case LayersDone(step_id, layers):
                return self._on_layers(step_id, layers, now)
            case _:
                return self._on_link_event(event, now)

    def _with_job(
        self, key: TransferKey, now: float, act: Callable[[HandoverSender], list[Action] | None]
    ) -> list[Action]:
        job = self.jobs.get(PlanKey(key.request_id, key.attempt))
        if job is None or job.sender is None:
            return []
        actions = self._after_sender(job, act(job.sender) or [], now)
        self._release_if_complete(job)
        if job.delisted:
            actions += self._drop(job, now)
        return actions

    def _on_layers(self, step_id: int, layers: int, now: float) -> list[Action]:
        plan = self._plans.get(step_id)
        actions: list[Action] = []
        for part in plan.scheduled if plan is not None else ():
            job = self._by_seq.get(part.seq_id)
            if job is not None and job.sender is not None and not job.is_record:
                end = part.start_position + len(part.token_ids)
                actions += job.sender.progress(part.start_position, end, layers, now)
                self._sync_pin(job)
        if layers >= self.shape.num_layers:
            self._plans.pop(step_id, None)
        return actions

    def _on_link_event(self, event: Event, now: float) -> list[Action]:
        news = self.decodes.on_event(event, now)
        actions = news.actions
        for peer in news.up:
            for job in self._aimed_at(peer):
                assert job.sender is not None
                actions += job.sender.on_peer_up(now)
        for peer in news.lost:
            for job in self._aimed_at(peer):
                assert job.sender is not None
                actions += self._after_sender(job, job.sender.on_peer_lost(now), now)
                self._release_if_complete(job)
        if news.key is not None and news.message is not None:
            actions += self._on_answer(news.key, news.message, now)
        return actions

    def _aimed_at(self, peer: Incarnation) -> list[PrefillJob]:
        return [
            job
            for job in self.jobs.values()
            if job.sender is not None and job.sender.key is not None and job.sender.key.decode == peer
        ]

    def _on_answer(self, key: TransferKey, message: Answer, now: float) -> list[Action]:
        job = self.jobs.get(PlanKey(key.request_id, key.attempt))
        if job is None or job.sender is None:
            return self.decodes.unwanted(message)
        actions = self._after_sender(job, self.decodes.dispatch(job.sender, message, now), now)
        self._release_if_complete(job)
        return actions

    # -- time

    def tick(self, now: float) -> list[Action]:
        """Repeat, give up, let go; and the list for the decode nodes."""
        actions = self._on_link_event(Tick(), now)
        for job in list(self.jobs.values()):
            actions += self._tick_job(job, now)
        if now - self._last_beat >= self.timers.beat_s:
            self._last_beat = now
            actions += self.decodes.beats(self._open_senders(), self.transfer_no)
        return actions

    def _tick_job(self, job: PrefillJob, now: float) -> list[Action]:
        if job.state in CURRENT and now > job.deadline:
            return self._fail(job, "deadline", now, detail="deadline")
        if job.state in CURRENT and job.sender is not None:
            up = job.sender.key is not None and self.decodes.is_up(job.sender.key.decode)
            return self._after_sender(job, job.sender.tick(now, target_up=up), now)
        if job.is_record and job.seq_id is not None and now > job.until:
            self._let_go(job)
        if job.delisted and job.seq_id is None and not job.pinned:
            self._forget(job)
        return []

    def _open_senders(self) -> list[HandoverSender]:
        wanted = (SendState.ASKING, SendState.QUEUED, SendState.GRANTED, SendState.COMMITTING)
        return [j.sender for j in self.jobs.values() if j.sender is not None and j.sender.state in wanted]

    def flush(self, now: float) -> list[Action]:
        """Give transfer slots in the order of the jobs' age."""
        waiting = [j for j in self._by_seq.values() if j.sender is not None and j.sender.wants_slot]
        if not waiting:
            return []
        busy: dict[Incarnation, int] = {}
        for job in self.jobs.values():
            sender = job.sender
            if sender is not None and sender.key is not None and sender.may_send and self._sending(sender):
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
                actions += self._after_sender(job, job.sender.give_slot(now), now)
        return actions

    def _sending(self, sender: HandoverSender) -> bool:
        return sender.state is SendState.GRANTED or sender.pieces_in_flight > 0

    # -- the end

    def drain(self, now: float) -> list[Action]:
        """No new jobs; what is here goes on."""
        self.draining = True
        return []

    def give_back_all(self, now: float) -> list[Action]:
        """Give back what is not handed over: it is planned again elsewhere."""
        actions: list[Action] = []
        for job in [j for j in self.jobs.values() if j.state in CURRENT]:
            actions += self._abort_sender(job, now)
            self._let_go(job)
            job.machine.move(JobEvent.GIVE_BACK, now)
            actions.append(self._gone(job))
        return actions

    def is_quiescent(self) -> bool:
        """Nothing is held and nothing is recorded."""
        return not self.jobs and not self._by_seq

    def _abort_sender(self, job: PrefillJob, now: float) -> list[Action]:
        if job.sender is None:
            return []
        actions = job.sender.abort(now)
        self._sync_pin(job)
        return actions

    def _drop(self, job: PrefillJob, now: float) -> list[Action]:
        """The worker wants no more of it. It stays, unlisted, only while somebody still needs its blocks."""
        sender = job.sender
        handing = job.state is JobState.HANDED and job.seq_id is not None and sender is not None and not sender.complete
        if handing and now <= job.until:
            job.delisted = True
            return []
        actions = self._abort_sender(job, now)
        self._let_go(job)
        if job.pinned:
            job.delisted = True
            return actions
        self._forget(job)
        return actions

    def _let_go(self, job: PrefillJob) -> None:
        """End the job's sequence; what is computed becomes prefix cache."""
        if job.seq_id is None:
            return
        if self.scheduler.status(job.seq_id) is Status.PREFILLED:
            self.scheduler.release(job.seq_id)
        else:
            self.scheduler.abort(job.seq_id)
        self._detach(job)

    def _detach(self, job: PrefillJob) -> None:
        """The scheduler's sequence is no longer this job's; blocks that a transport still reads stay pinned there."""
        if job.seq_id is not None:
            self._by_seq.pop(job.seq_id, None)
            job.pin_seq = job.seq_id
            job.seq_id = None

    def _forget(self, job: PrefillJob) -> None:
        self.jobs.pop(job.plan_key, None)

    def _sync_pin(self, job: PrefillJob) -> None:
        """Blocks are pinned while the transport may read them."""
        in_flight = job.sender is not None and job.sender.pieces_in_flight > 0
        if in_flight == job.pinned:
            return
        job.pinned = in_flight
        seq_id = job.seq_id if job.seq_id is not None else job.pin_seq
        assert seq_id is not None
        (self.scheduler.pin if in_flight else self.scheduler.unpin)(seq_id)

    def check_invariants(self) -> None:
        """Raises InvariantError when the indexes disagree."""
        for plan_key, job in self.jobs.items():
            job.check_invariants()
            if job.plan_key != plan_key:
                raise InvariantError(f"{job.plan_key} is filed under {plan_key}")
            if job.seq_id is not None and self._by_seq.get(job.seq_id) is not job:
                raise InvariantError(f"{job.plan_key} is not indexed by its sequence")
        for seq_id, job in self._by_seq.items():
            if job.seq_id != seq_id or self.jobs.get(job.plan_key) is not job:
                raise InvariantError(f"sequence {seq_id} belongs to no job")
