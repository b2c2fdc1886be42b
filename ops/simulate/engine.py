"""The simulated engine: executes step batches in FIFO order, each for the duration of the cost model.

It works on simulated cache contents. The copies of a step between device and host precede its computation and take
effect at the end of their duration. Then the KV below each chunk is checked; a layer's KV is written when that layer
is done, not before. No real time, no device.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.common.cluster.events import Event, LayersDone, StepDone, StepProgressed
from kvferry.common.engine.engine_thread import PROGRESS_INTERVAL_S
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult
from kvferry.common.scheduling.tokens_in_flight import TokensInFlight
from kvferry.ops.simulate.clock import EventLoop
from kvferry.ops.simulate.costs import CostModel
from kvferry.ops.simulate.kv_store import KvMismatchError, KvStore
from kvferry.ops.simulate.model import content, draw, extend

COPYING = -1


@dataclass(slots=True)
class _Running:
    """State of a sequence at the model runner."""

    token_ids: list[int]
    digests: list[int]
    sampling: SamplingParams


@dataclass(slots=True)
class SimEngine:
    """Runs on the loop of the world; `post` passes events to its process."""

    loop: EventLoop
    costs: CostModel
    store: KvStore
    post: Callable[[Event], None]
    name: str
    poisoned: frozenset[int] = frozenset()
    """Seeds of requests whose sampling fails (not-a-number logits)."""
    killers: frozenset[int] = frozenset()
    """Seeds of requests whose decoding crashes the process."""
    on_kill: Callable[[int], None] | None = None
    check_kv: bool = True
    weights: int = 0
    """See `weights_number`."""
    slowness: float = 1.0
    stopped: bool = False
    """Wedged, frozen or dead: the step in progress makes no progress."""
    _queue: deque[StepBatch] = field(default_factory=deque)
    _sequences: dict[int, _Running] = field(default_factory=dict)
    _in_flight: TokensInFlight = field(default_factory=TokensInFlight)
    _stage: tuple[StepBatch, int] | None = None
    """The step in progress, and the number of its layers done; COPYING before the first."""
    _timer: int = 0
    """Number of the latest timer: earlier ones have no effect."""

    def run(self, batch: StepBatch) -> None:
        self._queue.append(batch)
        if self._stage is None and not self.stopped:
            self._begin()

    def stop(self) -> None:
        """Stop until `resume`."""
        self.stopped = True
        self._timer += 1

    def resume(self) -> None:
        """Continue the step in progress after a freeze."""
        if not self.stopped:
            return
        self.stopped = False
        if self._stage is not None:
            self._schedule_next()
        elif self._queue:
            self._begin()

    def _begin(self) -> None:
        batch = self._in_flight.fill(self._queue.popleft())
        for seq_id in batch.finished:
            self._sequences.pop(seq_id, None)
        for new in batch.new:
            ids = list(new.token_ids)
            digest, digests = 0, []
            for token_id in ids:
                digest = extend(digest, token_id)
                digests.append(digest)
            self._sequences[new.seq_id] = _Running(ids, digests, new.sampling)
        self._stage = (batch, COPYING)
        if batch.has_copies:
            self._schedule_next()
        else:
            self._copied(self._timer)

    def _schedule_next(self) -> None:
        assert self._stage is not None
        batch, done = self._stage
        if done != COPYING:
            self._schedule_next_layer()
            return
        self._timer += 1
        self.loop.after(self.slowness * self.costs.swap_duration_s(batch), self._copied, self._timer)

    def _copied(self, timer: int) -> None:
        if timer != self._timer or self._stage is None:
            return
        batch, _ = self._stage
        if self.check_kv:
            for copies in batch.swap_out:
                self.store.copy_out(copies.device_blocks, copies.host_blocks)
            for copies in batch.swap_in:
                self.store.copy_in(copies.device_blocks, copies.host_blocks)
        for part in batch.scheduled:
            self._append_tokens(part)
        self._stage = (batch, 0)
        self._schedule_next_layer()

    def _append_tokens(self, part: ScheduledSequence) -> None:
        running = self._sequences[part.seq_id]
        ids, start, end = running.token_ids, part.start_position, part.start_position + len(part.token_ids)
        if len(ids) < start:
            raise KvMismatchError(f"{self.name}: a step of sequence {part.seq_id} skips token ids")
        for token_id in part.token_ids[len(ids) - start :]:
            ids.append(token_id)
            running.digests.append(extend(running.digests[-1], token_id))
        if ids[start:end] != list(part.token_ids):
            raise KvMismatchError(f"{self.name}: a step changes token ids of sequence {part.seq_id}")
        if self.check_kv:
            self.store.check(part.block_table, running.digests, start, f"{self.name} sequence {part.seq_id}")

    def _schedule_next_layer(self) -> None:
        assert self._stage is not None
        self._timer += 1
        batch, num_layers = self._stage[0], self.store.num_layers
        share = num_layers if not self.check_kv and not batch.report_layers else 1
        self.loop.after(share * self._layer_s(batch), self._layers_done, share, self._timer)

    def _layer_s(self, batch: StepBatch) -> float:
        return self.slowness * self.costs.step_duration_s(batch) / self.store.num_layers

    def _layers_done(self, share: int, timer: int) -> None:
        if timer != self._timer or self._stage is None:
            return
        batch, done = self._stage
        if self.killers and self._dies(batch):
            return
        if self.check_kv:
            for part in batch.scheduled:
                self._write(part, done)
        done += share
        self._stage = (batch, done)
        if batch.report_layers:
            self.post(LayersDone(batch.step_id, done))
        elif self._layer_s(batch) >= PROGRESS_INTERVAL_S:
            self.post(StepProgressed())
        if done < self.store.num_layers:
            if not self.stopped:
                self._schedule_next_layer()
            return
        self._stage = None
        result = self._result(batch)
        self._in_flight.note(result)
        self.post(StepDone(result))
        if self._stage is None and self._queue and not self.stopped:
            self._begin()

    def _dies(self, batch: StepBatch) -> bool:
        """Crash the process if the batch decodes one of the killers; whether it did."""
        for part in batch.scheduled:
            running = self._sequences[part.seq_id]
            if running.sampling.seed in self.killers and len(part.token_ids) == 1 and self.on_kill is not None:
                self.on_kill(running.sampling.seed)
                return True
        return False

    def _write(self, part: ScheduledSequence, layer: int) -> None:
        start, end = part.start_position, part.start_position + len(part.token_ids)
        digests = self._sequences[part.seq_id].digests[start:end]
        self.store.write(layer, part.block_table, start, [content(digest, layer) for digest in digests])

    def _result(self, batch: StepBatch) -> StepResult:
        sampled: dict[int, int] = {}
        failed: dict[int, str] = {}
        for part in batch.scheduled:
            if part.sample:
                running = self._sequences[part.seq_id]
                if running.sampling.seed in self.poisoned:
                    failed[part.seq_id] = "not-a-number logits"
                else:
                    digest = running.digests[part.seed_position - 1]
                    sampled[part.seq_id] = draw(digest, running.sampling.seed, part.seed_position, self.weights)
        return StepResult(batch.step_id, sampled, failed, self.slowness * self.costs.step_duration_s(batch))
