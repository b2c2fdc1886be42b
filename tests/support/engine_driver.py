"""A minimal scheduler for tests: drives a ModelRunner with chunks and ragged batches on blocks in random order."""

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from kvferry.common.device.base import Device
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.graphs import Graphs
from kvferry.common.engine.decode_graphs import DecodeGraphs, GraphSize, num_scratch_blocks
from kvferry.common.engine.host_cache import HostCache
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.engine.runner import ModelRunner
from kvferry.common.engine.sampler import Sampler
from kvferry.common.models.load import LoadedModel
from kvferry.common.parallel.collectives import ALONE, Collectives
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.step import NewSequence, ScheduledSequence, StepBatch, StepResult

GREEDY = SamplingParams(max_new_tokens=1)


@dataclass
class Sequence:
    """A running sequence: its ids, and how many of them are in the cache."""

    seq_id: int
    ids: list[int]
    sampling: SamplingParams
    prompt_length: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    failed: str | None = None

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_length :]


class EngineDriver:
    """A runner with its own cache. Each `step` computes the given chunks and samples where a prompt ends."""

    def __init__(
        self,
        loaded: LoadedModel,
        device: Device | None = None,
        blocks: int = 256,
        block_size: int = 4,
        host_blocks: int = 0,
        collectives: Collectives = ALONE,
        graphs: Graphs | None = None,
        graph_sizes: tuple[GraphSize, ...] = (),
    ) -> None:
        # One thread: small models gain nothing from more, and lose much when other processes use the cores.
        device = device or CpuDevice(1)
        device.activate_thread()
        scratch = num_scratch_blocks(graph_sizes, block_size)
        self.cache = KvCache(device, loaded.kv_specs, loaded.config.num_layers, blocks, block_size, scratch)
        self.sampler = Sampler(loaded.config.vocab_size)
        self.host_cache = HostCache(device, self.cache, host_blocks)
        self.graphs: DecodeGraphs | None = None
        if graphs is not None:
            self.graphs = DecodeGraphs(loaded.model, self.cache, device, graphs, graph_sizes)
            self.graphs.record()
        self.runner = ModelRunner(
            loaded.model, self.cache, self.sampler, device, self.host_cache, collectives, self.graphs
        )
        self._free = list(range(blocks))
        random.Random(5).shuffle(self._free)
        self._seq_ids, self._step_ids = count(1), count(1)
        self._new: list[NewSequence] = []
        self._finished: list[int] = []

    def add(self, prompt: list[int], sampling: SamplingParams = GREEDY, prompt_length: int | None = None) -> Sequence:
        sequence = Sequence(next(self._seq_ids), list(prompt), sampling, prompt_length or len(prompt))
        self._new.append(NewSequence(sequence.seq_id, array("I", prompt), sampling))
        return sequence

    def share_prefix(self, source: Sequence, target: Sequence, blocks: int) -> None:
        """Start `target` on the first whole blocks of `source`, as a prefix cache does."""
        target.blocks = source.blocks[:blocks]
        target.computed = blocks * self.cache.block_size

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        while len(sequence.blocks) * self.cache.block_size < tokens:
            sequence.blocks.append(self._free.pop())

    def finish(self, sequence: Sequence) -> None:
        self._finished.append(sequence.seq_id)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Return the sequence's blocks to the free list."""
        self._free.extend(sequence.blocks)
        sequence.blocks = []

    def step(self, work: list[tuple[Sequence, int]], on_layers_done: Callable[[int], None] | None = None) -> StepResult:
        """Compute (sequence, maximum number of tokens) pairs in one batch."""
        scheduled = []
        for sequence, max_tokens in work:
            chunk = sequence.ids[sequence.computed : sequence.computed + max_tokens]
            end = sequence.computed + len(chunk)
            self.reserve(sequence, end)
            sample = end == len(sequence.ids)
            scheduled.append(
                ScheduledSequence(
                    sequence.seq_id,
                    array("I", chunk),
                    sequence.computed,
                    tuple(sequence.blocks),
                    sample,
                    end if sample else -1,
                )
            )
            sequence.computed = end
        batch = StepBatch(
            next(self._step_ids),
            tuple(scheduled),
            tuple(self._new),
            tuple(self._finished),
            report_layers=on_layers_done is not None,
        )
        self._new, self._finished = [], []
        result = self.runner.execute(batch, on_layers_done)
        for sequence, _ in work:
            if sequence.seq_id in result.sampled:
                sequence.ids.append(result.sampled[sequence.seq_id])
            sequence.failed = result.failed.get(sequence.seq_id, sequence.failed)
        self.runner.check_invariants()
        return result

    def generate(self, sequences: list[Sequence], new_tokens: int, chunk: int = 1 << 30) -> None:
        """Run all sequences together, in chunks of at most `chunk`, until each has its output tokens."""
        while work := [(s, chunk) for s in sequences if len(s.output) < new_tokens and s.failed is None]:
            self.step(work)

    def serve(self, sequences: list[Sequence], new_tokens: int, budget: int, in_flight: int) -> None:
        """Run at most `in_flight` sequences at a time: decodes first, the rest of the budget for prompts in order."""
        waiting, running = list(sequences), list[Sequence]()
        while waiting or running:
            while waiting and len(running) < in_flight:
                running.append(waiting.pop(0))
            left = budget
            work = []
            for sequence in sorted(running, key=lambda s: len(s.ids) - s.computed):
                share = min(left, len(sequence.ids) - sequence.computed)
                if share:
                    work.append((sequence, share))
                    left -= share
            self.step(work)
            for sequence in [s for s in running if len(s.output) >= new_tokens]:
                running.remove(sequence)
                self.finish(sequence)
