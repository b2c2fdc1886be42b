"""How a job comes to the prefill node: wanted, admitted, queued with its age. Pure. Protocol rules 13, 17, 19.

Here it is settled whether a job goes on in this process once its prompt is computed, or is handed over.
"""

from dataclasses import dataclass, replace

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.base.ids import (
    AttemptKey,
    Incarnation,
)
from kvferry.common.cluster.actions import (
    Action,
    Send,
)
from kvferry.common.cluster.clients import Client
from kvferry.common.cluster.node_role import LocalDecode
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Gone, Job
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SequenceSpec
from kvferry.prefill_node import job as reports
from kvferry.prefill_node.decode_links import DecodeLinks
from kvferry.prefill_node.job import PrefillJob
from kvferry.prefill_node.jobs import JobTable


@dataclass(slots=True)
class JobAdmission:
    """Takes jobs, or says why not."""

    self_id: Incarnation
    jobs: JobTable
    scheduler: Scheduler
    decodes: DecodeLinks
    timers: Timers
    limits: Limits
    most_tokens: int
    """Positions that all of the node's blocks have room for."""
    here: LocalDecode | None
    draining: bool = False

    def on_job(self, client: Client, message: Job, now: float) -> list[Action]:
        """A Job came; a copy of one that is known changes nothing."""
        key = AttemptKey(message.request_id, message.attempt)
        if key in self.jobs.by_attempt or (self.here is not None and self.here.knows(*key)):
            return []
        if not client.wants(message.placement_no, *key):
            gone = Gone(request_id=key.request_id, attempt=key.attempt, reason="lost", detail="not wanted any more")
            return [Send(client.incarnation, gone)]
        reason = self._refusal(message)
        if reason is not None:
            return [Send(client.incarnation, reports.failed(message, reason))]
        deadline = now + message.remaining_ms / 1000 + self.timers.deadline_grace_s
        job = PrefillJob(client.incarnation, message, self._spec(message, now), deadline)
        try:
            seq_id, actions = self._enqueue(job, now)
        except RequestInvalidError as error:
            failed = reports.failed(message, "invalid", detail=str(error), retryable=False)
            return [Send(client.incarnation, failed)]
        self.jobs.add(job, seq_id)
        for candidate in message.candidates if not job.stays else ():
            if candidate.incarnation != self.self_id:
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

    def _spec(self, message: Job, now: float) -> SequenceSpec:
        """What the scheduler is told. Mode `decode` is a job that goes on here."""
        spec = SequenceSpec(
            token_ids=message.prompt_token_ids + message.output_token_ids,
            num_prompt_tokens=len(message.prompt_token_ids),
            sampling=message.sampling,
            priority=message.priority,
            accepted_at=now - message.waited_ms / 1000,
            mode="prefill",
            times_preempted=message.times_preempted,
        )
        return replace(spec, mode="decode") if self._stays(message, spec) else spec

    def _stays(self, message: Job, spec: SequenceSpec) -> bool:
        """Named here, or nowhere: it goes on here, unless only another node could hold it to its end."""
        named = {candidate.incarnation for candidate in message.candidates}
        if self.here is None or (named and self.self_id not in named):
            return False
        return spec.max_kv_tokens <= self.most_tokens or len(named) <= 1

    def _enqueue(self, job: PrefillJob, now: float) -> tuple[int, list[Action]]:
        """Queue it; an earlier attempt that holds KV here gives its blocks to it."""
        message, spec = job.job, job.spec
        actions: list[Action] = []
        for earlier in self.jobs.of_request(message.request_id):
            if earlier.job.attempt < message.attempt and earlier.seq_id is not None:
                actions += self.jobs.abort_sender(earlier, now)
                if earlier.pinned:
                    actions += self.jobs.drop(earlier, now)
                    continue
                seq_id = self.scheduler.inherit_blocks(earlier.seq_id, spec, now)
                self.jobs.detach(earlier)
                self.jobs.forget(earlier)
                return seq_id, actions
        return self.scheduler.add(spec, now), actions
