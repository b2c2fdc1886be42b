"""What runs in the next step, and who starts. Changes sequences through their table only."""

from collections.abc import Callable

from kvferry.common.scheduling.admission import Admission
from kvferry.common.scheduling.events import SchedulerEvent, Started
from kvferry.common.scheduling.preemption_policy import PreemptionPolicy
from kvferry.common.scheduling.results import prefilled
from kvferry.common.scheduling.sequence import SchedulerConfig, Sequence, SequenceSpec, SequenceStatus
from kvferry.common.scheduling.sequence_table import SequenceTable
from kvferry.common.scheduling.step_builder import StepBuilder
from kvferry.common.scheduling.waiting_queue import (
    WaitingQueue,
    effective_class,
)

MayStart = Callable[[SequenceSpec], bool]


class StepPlanner:
    """Decoding sequences first, then prompts; deterministic. Writes what happened into the list of events given."""

    def __init__(
        self,
        config: SchedulerConfig,
        table: SequenceTable,
        queue: WaitingQueue,
        admission: Admission,
        room: PreemptionPolicy,
    ) -> None:
        self._config = config
        self._table = table
        self._queue = queue
        self._admission = admission
        self._preemption = room

    def fill(self, batch: StepBuilder, now: float, may_start: MayStart, events: list[SchedulerEvent]) -> None:
        """Share the batch's budget out."""
        self._preemption.make(batch, now, events)
        for seq in self._table.members(SequenceStatus.DECODING).values():
            if not self._preemption.has_room(seq):
                continue
            if seq.may_go_ahead:
                batch.give_ahead(seq)
            else:
                batch.give(seq, 1)
        self._give_to_prompts(batch, now, may_start, events)

    def start(self, seq: Sequence, num_cached: int, events: list[SchedulerEvent]) -> None:
        """A waiting sequence has its blocks. If all but the last known id is there, nothing needs computing."""
        seq.set_computed(num_cached)
        events.append(Started(seq.seq_id, num_cached))
        spec = seq.spec
        goes_on = spec.is_retry and spec.sampling.max_new_tokens - seq.num_outputs > 1  # else the draw happens here
        if spec.mode == "prefill" and goes_on and num_cached == spec.num_known - 1:
            self._table.move(seq, SequenceStatus.PREFILLED)
            events.append(prefilled(seq))
        else:
            self._table.move(seq, SequenceStatus.COMPUTING)

    def _give_to_prompts(
        self, batch: StepBuilder, now: float, may_start: MayStart, events: list[SchedulerEvent]
    ) -> None:
        """The rest of the budget: prompts by class, then turn, whether under way or waiting. The head of the queue that
        cannot start stops the queue: what is behind it must not take its blocks."""
        running = sorted(self._table.members(SequenceStatus.COMPUTING).values(), key=lambda seq: self._turn(seq, now))
        chunk = self._config.max_chunk_tokens or self._config.max_step_tokens
        turn = 0
        head = self._head(now)
        while batch.budget_tokens > 0:
            if head is not None and (turn == len(running) or self._turn(head, now) < self._turn(running[turn], now)):
                started = self._try_start(head, may_start, events)
                if head.status is SequenceStatus.COMPUTING:
                    running.insert(turn, head)
                head = self._head(now) if started else None
            elif turn < len(running):
                batch.give(running[turn], chunk)
                turn += 1
            else:
                break
        for seq in running:
            batch.give(seq, batch.budget_tokens)

    def _head(self, now: float) -> Sequence | None:
        seq_id = self._queue.peek(now)
        return None if seq_id is None else self._table.get(seq_id)

    def _turn(self, seq: Sequence, now: float) -> tuple[int, float, int]:
        return (
            effective_class(seq.spec.priority, seq.virtual_finish_time, now, self._config.aging_s),
            seq.virtual_finish_time,
            seq.seq_id,
        )

    def _try_start(self, seq: Sequence, may_start: MayStart, events: list[SchedulerEvent]) -> bool:
        if not may_start(seq.spec):
            return False
        num_cached = self._admission.acquire(seq)
        if num_cached is None:
            return False
        self._queue.remove(seq.seq_id)
        self.start(seq, num_cached, events)
        return True
