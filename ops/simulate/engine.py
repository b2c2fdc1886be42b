"""The simulated engine: takes step plans one after the other, as long as the cost model says. Real cache contents.

A step's copies between device and host come first, and are made when their time is over. Then it checks the KV below
each chunk; a layer's KV is written when that layer is done, not before.
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
    """What the runner keeps of a sequence."""

    token_ids: list[int]
    digests: list[int]
    sampling: SamplingParams


@dataclass(slots=True)
class SimEngine:
    """Runs on the world's loop; `post` hands events to the process it belongs to."""

    loop: EventLoop
    costs: CostModel
    store: KvStore
    post: Callable[[Event], None]
    name: str
    poisoned: frozenset[int] = frozenset()
    """Seeds of requests for which no token can be sampled after the first."""
    killers: frozenset[int] = frozenset()
    """Seeds of requests whose decoding ends the process."""
    on_kill: Callable[[int], None] | None = None
    check_kv: bool = True
    weights: int = 0
    """See `weights_number`."""
    slowness: float = 1.0
    stopped: bool = False
    """Wedged, frozen or dead: the step in progress does not end while this holds."""
    _queue: deque[StepBatch] = field(default_factory=deque)
    _sequences: dict[int, _Running] = field(default_factory=dict)
    _drawn: TokensInFlight = field(default_factory=TokensInFlight)
    _stage: tuple[StepBatch, int] | None = None
    """The step in progress, and how many of its layers are done; COPYING before the first."""
    _timer_no: int = 0

    def run(self, plan: StepBatch) -> None:
        """Queue a step."""
        self._queue.append(plan)
        if self._stage is None and not self.stopped:
            self._begin()

    def stop(self) -> None:
        """Do nothing more until `resume`."""
        self.stopped = True
        self._timer_no += 1

    def resume(self) -> None:
        """The end of a freeze: the step in progress continues."""
        if not self.stopped:
            return
        self.stopped = False
        if self._stage is not None:
            self._plan_next()
        elif self._queue:
            self._begin()

    def _begin(self) -> None:
        plan = self._drawn.fill(self._queue.popleft())
        for seq_id in plan.finished:
            self._sequences.pop(seq_id, None)
        for new in plan.new:
            ids = list(new.token_ids)
            digest, digests = 0, []
            for token_id in ids:
                digest = extend(digest, token_id)
                digests.append(digest)
            self._sequences[new.seq_id] = _Running(ids, digests, new.sampling)
        self._stage = (plan, COPYING)
        if plan.has_copies:
            self._plan_next()
        else:
            self._copied(self._timer_no)

    def _plan_next(self) -> None:
        assert self._stage is not None
        plan, done = self._stage
        if done != COPYING:
            self._plan_next_layer()
            return
        self._timer_no += 1
        self.loop.after(self.slowness * self.costs.swap_duration_s(plan), self._copied, self._timer_no)

    def _copied(self, timer_no: int) -> None:
        if timer_no != self._timer_no or self._stage is None:
            return
        plan, _ = self._stage
        if self.check_kv:
            for copies in plan.swap_out:
                self.store.copy_out(copies.device_blocks, copies.host_blocks)
            for copies in plan.swap_in:
                self.store.copy_in(copies.device_blocks, copies.host_blocks)
        for part in plan.scheduled:
            self._take_in(part)
        self._stage = (plan, 0)
        self._plan_next_layer()

    def _take_in(self, part: ScheduledSequence) -> None:
        running = self._sequences[part.seq_id]
        ids, start, end = running.token_ids, part.start_position, part.start_position + len(part.token_ids)
        if len(ids) < start:
            raise KvMismatchError(f"{self.name}: a step of sequence {part.seq_id} leaves ids out")
        for token_id in part.token_ids[len(ids) - start :]:
            ids.append(token_id)
            running.digests.append(extend(running.digests[-1], token_id))
        if ids[start:end] != list(part.token_ids):
            raise KvMismatchError(f"{self.name}: a step names other ids for sequence {part.seq_id} than before")
        if self.check_kv:
            self.store.check(part.block_table, running.digests, start, f"{self.name} sequence {part.seq_id}")

    def _plan_next_layer(self) -> None:
        assert self._stage is not None
        self._timer_no += 1
        plan, num_layers = self._stage[0], self.store.num_layers
        share = num_layers if not self.check_kv and not plan.report_layers else 1
        self.loop.after(share * self._layer_s(plan), self._layers_done, share, self._timer_no)

    def _layer_s(self, plan: StepBatch) -> float:
        return self.slowness * self.costs.step_duration_s(plan) / self.store.num_layers

    def _layers_done(self, share: int, timer_no: int) -> None:
        if timer_no != self._timer_no or self._stage is None:
            return
        plan, done = self._stage
        if self.killers and self._dies(plan):
            return
        if self.check_kv:
            for part in plan.scheduled:
                self._write(part, done)
        done += share
        self._stage = (plan, done)
        if plan.report_layers:
            self.post(LayersDone(plan.step_id, done))
        elif self._layer_s(plan) >= PROGRESS_INTERVAL_S:
            self.post(StepProgressed())
        if done < self.store.num_layers:
            if not self.stopped:
                self._plan_next_layer()
            return
        self._stage = None
        result = self._result(plan)
        self._drawn.note(result)
        self.post(StepDone(result))
        if self._stage is None and self._queue and not self.stopped:
            self._begin()

    def _dies(self, plan: StepBatch) -> bool:
        """Whether decoding one of these requests was the last thing that the process did."""
        for part in plan.scheduled:
            running = self._sequences[part.seq_id]
            if running.sampling.seed in self.killers and len(part.token_ids) == 1 and self.on_kill is not None:
                self.on_kill(running.sampling.seed)
                return True
        return False

    def _write(self, part: ScheduledSequence, layer: int) -> None:
        start, end = part.start_position, part.start_position + len(part.token_ids)
        digests = self._sequences[part.seq_id].digests[start:end]
        self.store.write(layer, part.block_table, start, [content(digest, layer) for digest in digests])

    def _result(self, plan: StepBatch) -> StepResult:
        sampled: dict[int, int] = {}
        failed: dict[int, str] = {}
        for part in plan.scheduled:
            if part.sample:
                running = self._sequences[part.seq_id]
                if running.sampling.seed in self.poisoned:
                    failed[part.seq_id] = "not-a-number logits"
                else:
                    digest = running.digests[part.seed_position - 1]
                    sampled[part.seq_id] = draw(digest, running.sampling.seed, part.seed_position, self.weights)
        return StepResult(plan.step_id, sampled, failed, self.slowness * self.costs.step_duration_s(plan))
