"""Runs one step of the model: what the scheduler planned goes in, tokens come out. Decides nothing about order."""

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvferry.common.device.base import Device
from kvferry.common.engine.batch import InputBatch, make_batch
from kvferry.common.engine.decode_graphs import DecodeGraphs
from kvferry.common.engine.host_cache import HostCache
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.engine.sampler import SampleResult
from kvferry.common.engine.staging import Staging
from kvferry.common.models.family import CausalLM
from kvferry.common.parallel.collectives import ALONE, Collectives
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult

OnLayersDone = Callable[[int], None]


class TokenSampler(Protocol):
    """What draws; `common.engine.sampler.Sampler` is one."""

    def add(self, seq_id: int, token_ids: "array[int]", sampling: SamplingParams) -> None:
        """Meet a sequence."""
        ...

    def drop(self, seq_id: int) -> None:
        """Forget a sequence."""
        ...

    def sample(self, seq_ids: Sequence[int], positions: Sequence[int], logits: Tensor) -> SampleResult:
        """Draw one token each."""
        ...

    def check_invariants(self) -> None:
        """Raises InvariantError."""
        ...


class ModelRunner:
    """One model, one cache, one sampler on one device. Used by one thread, which has called device.activate_thread."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KvCache,
        sampler: TokenSampler,
        device: Device,
        host_cache: HostCache | None = None,
        collectives: Collectives = ALONE,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`host_cache`: None where no plan ever swaps. `graphs`: None where every step is started kernel by kernel.

        `collectives`: those of the model. A step that computes has sums that wait for every rank; one of nothing but
        copies gets one here, for blocks are free when it has come back, on every rank.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._host_cache = host_cache or HostCache(device, kv_cache, 0)
        self._sampler = sampler
        self._device = device
        self._collectives = collectives
        self._staging = Staging(device)
        self._graphs = graphs

    def execute(self, plan: StepBatch, on_layers_done: OnLayersDone | None = None) -> StepResult:
        """Copy what the plan swaps, compute its tokens, write their KV, draw where asked; all done on return.

        on_layers_done(1), (2), ... is called in this thread: with plan.report_layers each time when the KV of that many
        layers is complete in the cache, else when their kernels have been started, and not of a replayed step.
        Logits that are not finite fail their own sequence only.
        """
        started = time.perf_counter()
        for seq_id in plan.finished:
            self._sampler.drop(seq_id)
        for new in plan.new:
            self._sampler.add(new.seq_id, new.token_ids, new.sampling)
        self._swap(plan)
        if not plan.scheduled:
            if plan.has_copies:
                self._collectives.sum(torch.zeros(1, device=self._device.torch_device))
                self._device.synchronize()
            return StepResult(plan.step_id, duration_s=time.perf_counter() - started)
        with torch.inference_mode():
            sampled, failed = self._step(plan, on_layers_done)
        return StepResult(plan.step_id, sampled, failed, time.perf_counter() - started)

    def check_invariants(self) -> None:
        """Those of the caches and the sampler."""
        self._kv_cache.check_invariants()
        self._host_cache.check_invariants()
        self._sampler.check_invariants()

    def _swap(self, plan: StepBatch) -> None:
        """On the stream that computes: ordered before this step's work, and done when that is."""
        with torch.inference_mode():
            for copies in plan.swap_out:
                self._host_cache.copy_out(copies.device_blocks, copies.host_blocks)
            for copies in plan.swap_in:
                self._host_cache.copy_in(copies.device_blocks, copies.host_blocks)

    def _step(self, plan: StepBatch, on_layers_done: OnLayersDone | None) -> tuple[dict[int, int], dict[int, str]]:
        if plan.report_layers and on_layers_done is not None:
            batch, hidden = self._forward(plan.scheduled, self._synchronized(on_layers_done))
        else:
            batch, hidden = self._replay(plan.scheduled) or self._forward(plan.scheduled, on_layers_done)
        if not batch.sampled_ids:
            self._device.synchronize()
            return {}, {}
        if len(batch.sampled_ids) < hidden.shape[0]:
            hidden = hidden.index_select(0, batch.sampled_rows)
        drawn = self._sampler.sample(batch.sampled_ids, batch.sampled_positions, self._model.logits(hidden))
        # Not every sampler waits, and the next step's inputs go where this one's are.
        self._device.synchronize()
        return drawn.sampled, drawn.failed

    def _replay(self, scheduled: Sequence[ScheduledSequence]) -> tuple[InputBatch, Tensor] | None:
        return None if self._graphs is None else self._graphs.forward(scheduled)

    def _forward(
        self, scheduled: Sequence[ScheduledSequence], on_layer: OnLayersDone | None
    ) -> tuple[InputBatch, Tensor]:
        batch = make_batch(scheduled, self._kv_cache.block_size, self._staging)
        return batch, self._model.forward(batch.token_ids, batch.positions, self._kv_cache.layers, batch.meta, on_layer)

    def _synchronized(self, on_layers_done: OnLayersDone) -> OnLayersDone:
        """Wait for the device before saying that a layer is done: what is reported may be read at once."""

        def report(layers_done: int) -> None:
            self._device.synchronize()
            on_layers_done(layers_done)

        return report
