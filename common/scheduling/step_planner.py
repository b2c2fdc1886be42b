"""Chooses what the next step computes and which waiting sequences start. Pure; changes sequences via their table."""

from collections.abc import Callable

from kvferry.common.scheduling.admission import Admission
from kvferry.common.scheduling.events import SchedulerEvent, Started
from kvferry.common.scheduling.preemption_policy import PreemptionPolicy
from kvferry.common.scheduling.results import prefilled
from kvferry.common.scheduling.sequence import SchedulerConfig, Sequence, SequenceSpec, SequenceStatus
from kvferry.common.scheduling.sequence_table import SequenceTable
from kvferry.common.scheduling.step_builder import StepBuilder
from kvferry.common.scheduling.waiting_queue import WaitingQueue, effective_class

MayStart = Callable[[SequenceSpec], bool]


class StepPlanner:
    """Schedules decoding sequences first, then prompts. Deterministic. Appends events to the caller's list."""

    def __init__(
        self,
        config: SchedulerConfig,
        table: SequenceTable,
        queue: WaitingQueue,
        admission: Admission,
        preemption: PreemptionPolicy,
    ) -> None:
        self._config = config
        self._table = table
        self._queue = queue
        self._admission = admission
        self._preemption = preemption

    def fill(self, builder: StepBuilder, now: float, may_start: MayStart, events: list[SchedulerEvent]) -> None:
        """Spend the builder's token budget."""
        self._preemption.allocate(builder, now, events)
        for seq in self._table.members(SequenceStatus.DECODING).values():
            if not self._preemption.has_next_block(seq):
                continue
            if seq.may_schedule_ahead:
                builder.add_ahead(seq)
            else:
                builder.add(seq, 1)
        self._add_prompts(builder, now, may_start, events)

    def start(self, seq: Sequence, num_cached: int, events: list[SchedulerEvent]) -> None:
        """Start a waiting sequence whose blocks are allocated.

        If a retry of mode `prefill` has KV for all but its last known id, nothing is computed: it is PREFILLED.
        """
        seq.set_computed(num_cached)
        events.append(Started(seq.seq_id, num_cached))
        spec = seq.spec
        # With one output token left, this node samples it, so the last known id has to be computed here.
        is_continued_elsewhere = spec.is_retry and spec.sampling.max_new_tokens - seq.num_outputs > 1
        if spec.mode == "prefill" and is_continued_elsewhere and num_cached == spec.num_known - 1:
            self._table.move(seq, SequenceStatus.PREFILLED)
            events.append(prefilled(seq))
        else:
            self._table.move(seq, SequenceStatus.COMPUTING)

    def _add_prompts(self, builder: StepBuilder, now: float, may_start: MayStart, events: list[SchedulerEvent]) -> None:
        """Spend the rest of the budget on prompts, computing or waiting, in the order of `_order`."""
        running = sorted(self._table.members(SequenceStatus.COMPUTING).values(), key=lambda seq: self._order(seq, now))
        chunk = self._config.max_chunk_tokens or self._config.max_step_tokens
        index = 0
        head = self._head(now)
        while builder.budget_tokens > 0:
            if head is not None and (
                index == len(running) or self._order(head, now) < self._order(running[index], now)
            ):
                started = self._try_start(head, may_start, events)
                if head.status is SequenceStatus.COMPUTING:
                    running.insert(index, head)
                # A head that cannot start blocks the queue: entries behind it must not take its blocks.
                head = self._head(now) if started else None
            elif index < len(running):
                builder.add(running[index], chunk)
                index += 1
            else:
                break
        for seq in running:
            builder.add(seq, builder.budget_tokens)

    def _head(self, now: float) -> Sequence | None:
        seq_id = self._queue.peek(now)
        return None if seq_id is None else self._table.get(seq_id)

    def _order(self, seq: Sequence, now: float) -> tuple[int, float, int]:
        """Smaller runs first: effective class, then virtual finish time."""
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
