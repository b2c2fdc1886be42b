"""Runs one step of the model: a step batch in, sampled tokens out. Does not schedule."""

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
from kvferry.common.engine.step_buffers import InputBuffers
from kvferry.common.models.family import CausalLM
from kvferry.common.parallel.collectives import ALONE, Collectives
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.step import ScheduledSequence, StepBatch, StepResult

OnLayersDone = Callable[[int], None]


class TokenSampler(Protocol):
    """Samples tokens and keeps state per sequence; `common.engine.sampler.Sampler` implements it."""

    def add(self, seq_id: int, token_ids: "array[int]", sampling: SamplingParams) -> None: ...

    def drop(self, seq_id: int) -> None: ...

    def sample(self, seq_ids: Sequence[int], positions: Sequence[int], logits: Tensor) -> SampleResult:
        """Sample one token of each sequence."""
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
        """`host_cache`: None if no step swaps. `graphs`: None if no decode step is recorded.

        `collectives` must be those of the model.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._host_cache = host_cache or HostCache(device, kv_cache, 0)
        self._sampler = sampler
        self._device = device
        self._collectives = collectives
        self._buffers = InputBuffers(device)
        self._graphs = graphs

    def execute(self, batch: StepBatch, on_layers_done: OnLayersDone | None = None) -> StepResult:
        """Copy the swapped blocks, compute the tokens, write their KV and sample. All work is complete on return.

        on_layers_done(1), (2), ... is called in this thread: with `batch.report_layers`, each time when the KV of that
        many layers is complete in the cache; otherwise when their kernels have been started, and not for a replayed
        step. Logits that are not finite fail their own sequence only.
        """
        started = time.perf_counter()
        for seq_id in batch.finished:
            self._sampler.drop(seq_id)
        for new in batch.new:
            self._sampler.add(new.seq_id, new.token_ids, new.sampling)
        self._swap(batch)
        if not batch.scheduled:
            if batch.has_copies:
                # When a step returns, its blocks are free on every rank. A computing step waits for all ranks in its
                # all-reduces; a step of copies alone has none of these, so it gets one.
                self._collectives.all_reduce(torch.zeros(1, device=self._device.torch_device))
                self._device.synchronize()
            return StepResult(batch.step_id, duration_s=time.perf_counter() - started)
        with torch.inference_mode():
            sampled, failed = self._compute(batch, on_layers_done)
        return StepResult(batch.step_id, sampled, failed, time.perf_counter() - started)

    def check_invariants(self) -> None:
        """Check the caches and the sampler. Raises InvariantError."""
        self._kv_cache.check_invariants()
        self._host_cache.check_invariants()
        self._sampler.check_invariants()

    def _swap(self, batch: StepBatch) -> None:
        # On the compute stream: ordered before this step's kernels, and complete when they are.
        with torch.inference_mode():
            for copies in batch.swap_out:
                self._host_cache.copy_out(copies.device_blocks, copies.host_blocks)
            for copies in batch.swap_in:
                self._host_cache.copy_in(copies.device_blocks, copies.host_blocks)

    def _compute(self, batch: StepBatch, on_layers_done: OnLayersDone | None) -> tuple[dict[int, int], dict[int, str]]:
        if batch.report_layers and on_layers_done is not None:
            inputs, hidden = self._forward(batch.scheduled, self._synchronized(on_layers_done))
        else:
            inputs, hidden = self._replay(batch.scheduled) or self._forward(batch.scheduled, on_layers_done)
        if not inputs.sampled_ids:
            self._device.synchronize()
            return {}, {}
        if len(inputs.sampled_ids) < hidden.shape[0]:
            hidden = hidden.index_select(0, inputs.sampled_rows)
        result = self._sampler.sample(inputs.sampled_ids, inputs.sampled_positions, self._model.logits(hidden))
        # Not every sampler synchronises, and the next step reuses this step's input buffers.
        self._device.synchronize()
        return result.sampled, result.failed

    def _replay(self, scheduled: Sequence[ScheduledSequence]) -> tuple[InputBatch, Tensor] | None:
        return None if self._graphs is None else self._graphs.forward(scheduled)

    def _forward(
        self, scheduled: Sequence[ScheduledSequence], on_layer: OnLayersDone | None
    ) -> tuple[InputBatch, Tensor]:
        inputs = make_batch(scheduled, self._kv_cache.block_size, self._buffers)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, self._kv_cache.layers, inputs.meta, on_layer)
        return inputs, hidden

    def _synchronized(self, on_layers_done: OnLayersDone) -> OnLayersDone:
        """Synchronise before reporting a layer: reported KV may be read immediately."""

        def report(layers_done: int) -> None:
            self._device.synchronize()
            on_layers_done(layers_done)

        return report
