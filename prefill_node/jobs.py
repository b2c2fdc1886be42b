"""All jobs of the prefill role: found by attempt and by sequence, and when their blocks are released. Pure.

The scheduler owns blocks; a job has them through its sequence. While the transport may still read them they are pinned
there, even if the job has ended. Protocol rules 21 and 22.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import AttemptKey, Incarnation, RequestId
from kvferry.common.cluster.actions import Action
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SequenceStatus
from kvferry.prefill_node.handover import HandoverSender
from kvferry.prefill_node.handover_table import SendState
from kvferry.prefill_node.job import JobState, PrefillJob

WANTED_AT_DECODE = (SendState.ASKING, SendState.QUEUED, SendState.GRANTED, SendState.COMMITTING)
"""States of hand-overs that are part of the wanted set for their decode node."""


@dataclass(slots=True)
class JobTable:
    """The jobs, and their sequences' pins."""

    scheduler: Scheduler
    by_attempt: dict[AttemptKey, PrefillJob] = field(default_factory=dict)
    by_seq: dict[int, PrefillJob] = field(default_factory=dict)

    def __iter__(self) -> Iterator[PrefillJob]:
        """A copy: jobs may be forgotten meanwhile."""
        return iter(list(self.by_attempt.values()))

    def add(self, job: PrefillJob, seq_id: int) -> None:
        job.seq_id = seq_id
        self.by_attempt[job.attempt_key] = self.by_seq[seq_id] = job

    # -- which ones

    def of_request(self, request_id: RequestId) -> list[PrefillJob]:
        return [job for job in self.by_attempt.values() if job.message.request_id == request_id]

    def of_worker(self, worker: Incarnation) -> list[PrefillJob]:
        return [job for job in self.by_attempt.values() if job.worker == worker]

    def aimed_at(self, peer: Incarnation) -> list[tuple[PrefillJob, HandoverSender]]:
        """Jobs whose hand-over is to this decode node."""
        return [
            (job, job.sender)
            for job in self.by_attempt.values()
            if job.sender is not None and job.sender.key is not None and job.sender.key.decode == peer
        ]

    def open_senders(self) -> list[HandoverSender]:
        """Hand-overs that belong in a wanted set."""
        return [
            j.sender for j in self.by_attempt.values() if j.sender is not None and j.sender.state in WANTED_AT_DECODE
        ]

    @property
    def ungranted_blocks(self) -> int:
        """Blocks of jobs without a grant of a decode node."""
        return sum(job.num_blocks for job in self.by_seq.values() if job.ungranted)

    @property
    def retained_blocks(self) -> int:
        """Blocks retained after failed hand-overs."""
        return sum(job.num_blocks for job in self.by_seq.values() if job.state is JobState.FAILED)

    # -- how they end

    def abort_sender(self, job: PrefillJob, now: float) -> list[Action]:
        """Its hand-over is not wanted any more."""
        return [] if job.sender is None else job.sender.abort(now)

    def drop(self, job: PrefillJob, now: float) -> list[Action]:
        """The worker does not want it any more. It stays, delisted, while the transport still reads its blocks."""
        actions = self.abort_sender(job, now)
        self.release(job)
        if job.pinned:
            job.delisted = True
        else:
            self.forget(job)
        return actions

    def release(self, job: PrefillJob) -> None:
        """End the job's sequence; its computed blocks become prefix cache. No piece can be sent again after this."""
        if job.seq_id is None:
            return
        if job.sender is not None:
            job.sender.forget_pieces()
        if self.scheduler.status(job.seq_id) is SequenceStatus.PREFILLED:
            self.scheduler.release(job.seq_id)
        else:
            self.scheduler.abort(job.seq_id)
        self.detach(job)

    def detach(self, job: PrefillJob) -> None:
        """The scheduler's sequence is no longer this job's. Blocks that the transport still reads stay pinned there."""
        if job.seq_id is not None:
            self.by_seq.pop(job.seq_id, None)
            job.pin_seq = job.seq_id
            job.seq_id = None

    def forget(self, job: PrefillJob) -> None:
        """Remove it from the table."""
        self.by_attempt.pop(job.attempt_key, None)

    def on_reading(self, job: PrefillJob, reading: bool) -> None:
        """The transport begins or ends to read the job's blocks: they are pinned meanwhile. A delisted job leaves with
        the last read."""
        job.pinned = reading
        seq_id = job.seq_id if job.seq_id is not None else job.pin_seq
        assert seq_id is not None
        (self.scheduler.pin if reading else self.scheduler.unpin)(seq_id)
        if job.delisted and not reading:
            self.forget(job)

    def check_invariants(self) -> None:
        """Raises InvariantError when the indexes disagree."""
        for attempt_key, job in self.by_attempt.items():
            job.check_invariants()
            if job.attempt_key != attempt_key:
                raise InvariantError(f"{job.attempt_key} is filed under {attempt_key}")
            if job.seq_id is not None and self.by_seq.get(job.seq_id) is not job:
                raise InvariantError(f"{job.attempt_key} is not indexed by its sequence")
        for seq_id, job in self.by_seq.items():
            if job.seq_id != seq_id or self.by_attempt.get(job.attempt_key) is not job:
                raise InvariantError(f"sequence {seq_id} belongs to no job")
