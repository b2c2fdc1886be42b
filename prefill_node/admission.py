"""Which Jobs a prefill node accepts, and how they enter the scheduler's queue. Pure. Protocol rules 13, 17, 19.

Decides here whether a job decodes in this process once its prompt is computed, or is handed over.
"""

from dataclasses import dataclass

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.base.ids import AttemptKey
from kvferry.common.cluster.actions import Action, Send
from kvferry.common.cluster.clients import Client
from kvferry.common.cluster.node_role import LocalDecode, RoleContext
from kvferry.common.protocol.messages import Gone, Job
from kvferry.common.scheduling.sequence import SequenceSpec
from kvferry.prefill_node import job as replies
from kvferry.prefill_node.decode_links import DecodeLinks
from kvferry.prefill_node.job import PrefillJob
from kvferry.prefill_node.jobs import JobTable


@dataclass(slots=True)
class JobAdmission:
    """Accepts jobs, or replies why not."""

    context: RoleContext
    jobs: JobTable
    decodes: DecodeLinks
    local_decode: LocalDecode | None
    draining: bool = False

    def on_job(self, client: Client, message: Job, now: float) -> list[Action]:
        """A copy of a Job that is known changes nothing."""
        key = AttemptKey(message.request_id, message.attempt)
        if key in self.jobs.by_attempt or (self.local_decode is not None and self.local_decode.knows(*key)):
            return []
        if not client.wants(message.placement_no, *key):
            gone = Gone(request_id=key.request_id, attempt=key.attempt, reason="lost", detail="not wanted any more")
            return [Send(client.incarnation, gone)]
        reason = self._refusal(message)
        if reason is not None:
            return [Send(client.incarnation, replies.failed(message, reason))]
        deadline = now + message.remaining_ms / 1000 + self.context.timers.deadline_grace_s
        job = PrefillJob(client.incarnation, message, self._sequence(message, now), deadline)
        try:
            seq_id, actions = self._enqueue(job, now)
        except RequestInvalidError as error:
            failed = replies.failed(message, "invalid", detail=str(error), retryable=False)
            return [Send(client.incarnation, failed)]
        self.jobs.add(job, seq_id)
        for candidate in message.candidates if not job.stays else ():
            if candidate.incarnation != self.context.self_id:
                actions += self.decodes.know(candidate, now)
        return actions

    def _refusal(self, message: Job) -> str | None:
        if self.draining:
            return "draining"
        if message.attempt > 1:
            return None  # later attempts are never refused by admission: they were admitted once
        scheduler, limits = self.context.scheduler, self.context.limits
        waiting = scheduler.load().waiting_tokens
        full = scheduler.num_waiting >= limits.queued_requests
        crowded = waiting > 0 and waiting + len(message.spec.prompt_token_ids) > limits.queued_tokens
        return "overloaded" if full or crowded else None

    def _sequence(self, message: Job, now: float) -> SequenceSpec:
        """What the scheduler is given. Mode `decode` is a job that decodes here."""
        accepted_at = now - message.waited_ms / 1000
        sequence = SequenceSpec.of(message.spec, accepted_at=accepted_at, mode="prefill")
        if not self._stays(message, sequence):
            return sequence
        return SequenceSpec.of(message.spec, accepted_at=accepted_at, mode="decode")

    def _stays(self, message: Job, sequence: SequenceSpec) -> bool:
        """Named here, or nowhere: decodes here, unless only another node could hold it to its end."""
        named = {candidate.incarnation for candidate in message.candidates}
        if self.local_decode is None or (named and self.context.self_id not in named):
            return False
        most_tokens = self.context.num_blocks * self.context.block_size
        return sequence.max_kv_tokens <= most_tokens or len(named) <= 1

    def _enqueue(self, job: PrefillJob, now: float) -> tuple[int, list[Action]]:
        """Queue the job. An earlier attempt that retains KV here passes its blocks on to it."""
        message, scheduler = job.message, self.context.scheduler
        actions: list[Action] = []
        for earlier in self.jobs.of_request(message.request_id):
            if earlier.message.attempt < message.attempt and earlier.seq_id is not None:
                actions += self.jobs.abort_sender(earlier, now)
                if earlier.pinned:
                    actions += self.jobs.drop(earlier, now)
                    continue
                seq_id = scheduler.inherit_blocks(earlier.seq_id, job.sequence, now)
                self.jobs.detach(earlier)
                self.jobs.forget(earlier)
                return seq_id, actions
        return scheduler.add(job.sequence, now), actions
