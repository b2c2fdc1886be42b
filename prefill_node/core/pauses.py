"""A prompt under way that others go before: its reservation does not wait with it. Pure. Protocol rule 20.

The scheduler gives the prompts of better classes, then the older ones, all of a step. What gets nothing pauses: it
keeps its blocks and what is computed, but room on a decode node that it cannot use soon is for those that can.
"""

from dataclasses import dataclass

from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.state.actions import Action
from kvferry.common.state.handover_send_table import SendState
from kvferry.prefill_node.core.job import JobState, PrefillJob

RELEASES_AT_ONCE = 1
"""After so many pauses room is asked for as soon as a prompt goes on."""


@dataclass(slots=True)
class Pauses:
    """Watches jobs that are being computed."""

    scheduler: Scheduler
    pause_release_s: float

    def tick(self, job: PrefillJob, now: float) -> list[Action]:
        """Give the reservation back of a job that has had no chunk under way for too long."""
        if job.state is not JobState.COMPUTING or job.sender is None or job.seq_id is None:
            return []
        if self.scheduler.is_in_step(job.seq_id):
            job.paused_since = None
        elif job.paused_since is None:
            job.paused_since = now
        elif now - job.paused_since > self.pause_release_s:
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
