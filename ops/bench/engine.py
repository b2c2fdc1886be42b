"""Measures the engine by itself: prefill and decode tokens per second through the node's runner, next to the limits of
the machine.

Whole steps are timed, with batch layout and sampling; there is no scheduler, node or network. Times are medians.
"""

import random
import statistics
import time
from array import array
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import msgspec
import psutil
import torch

from kvferry.common.base.ids import new_incarnation
from kvferry.common.device.base import Device
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.device.select import select_device
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.engine.runner import ModelRunner
from kvferry.common.engine.sampler import Sampler
from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.load import LoadedModel, load_model
from kvferry.common.parallel.collectives import ALONE
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.ranks.runner import LeadRunner
from kvferry.common.ranks.team import RankTeam
from kvferry.common.scheduling.step import NewSequence, ScheduledSequence, StepBatch
from kvferry.ops.bench.limits import MachineLimits, measure_limits, step_needs
from kvferry.ops.bench.peers.run import PeerOutcome
from kvferry.ops.bench.peers.spec import PeerTask
from kvferry.ops.bench.progress import case_progress, write_progress
from kvferry.ops.bench.ranks import Weights, make_team
from kvferry.ops.bench.report import EngineReport, MachineFacts, PeerReport, Rate
from kvferry.ops.cli.pluralize import pluralize

PROMPTS = (128, 512, 2048)
BATCHES = (1, 8, 32)
CONTEXT = 256
_PROMPT_ROUNDS = 3
_DECODE_STEPS = 12
_BLOCK_SIZE = 16
_GREEDY = SamplingParams(max_new_tokens=1)


class EngineBench:
    """One model on one device, with a cache large enough for the largest case."""

    def __init__(self, loaded: LoadedModel, device: Device, team: RankTeam | None = None) -> None:
        """Allocate the cache. With a team, `loaded` is the part of rank 0, and the team starts its engine here."""
        tokens = max(*PROMPTS, *(batch * (CONTEXT + _DECODE_STEPS + _BLOCK_SIZE) for batch in BATCHES))
        self._block_size = device.supported_block_size(_BLOCK_SIZE)
        blocks = -(-tokens // self._block_size) + len(BATCHES) * max(BATCHES)
        self._cache = KvCache(device, loaded.kv_specs, loaded.config.num_layers, blocks, self._block_size)
        own = ModelRunner(loaded.model, self._cache, Sampler(loaded.config.vocab_size), device)
        self._runner: ModelRunner | LeadRunner = own
        if team is not None:
            team.wait_loaded()
            team.initialize(new_incarnation(), blocks, device)
            self._runner = LeadRunner(own, team.broadcast_step)
        self._vocab = loaded.config.vocab_size
        self._random = random.Random(1)
        self._ids, self._steps = count(1), count(1)

    def prompt(self, length: int) -> float:
        """Median seconds of one step that computes a prompt of this many tokens."""
        return statistics.median(self._prompt(length) for _ in range(_PROMPT_ROUNDS))

    def decode(self, batch: int) -> float:
        """Median seconds of a step of `batch` sequences, each with CONTEXT to CONTEXT + _DECODE_STEPS cached tokens."""
        per_sequence = -(-(CONTEXT + _DECODE_STEPS) // self._block_size)
        tables = [tuple(range(i * per_sequence, (i + 1) * per_sequence)) for i in range(batch)]
        ids = [next(self._ids) for _ in tables]
        prompt = self._tokens(CONTEXT)
        self._run([(ids[0], prompt, 0, tables[0])], new={ids[0]: prompt})
        # The other sequences get copies of its cache: the contents do not change the time, separate blocks do.
        layers = self._cache.num_layers
        cached = self._cache.read(0, layers, tables[0], 0, CONTEXT)
        for table in tables[1:]:
            self._cache.write(0, layers, table, 0, CONTEXT, cached)
        self._add(ids[1:], prompt)
        times = []
        for position in range(CONTEXT, CONTEXT + _DECODE_STEPS):
            work = [(seq_id, self._tokens(1), position, table) for seq_id, table in zip(ids, tables, strict=True)]
            times.append(self._run(work))
        self._finish(ids)
        return statistics.median(times)

    def _prompt(self, length: int) -> float:
        seq_id, tokens = next(self._ids), self._tokens(length)
        seconds = self._run([(seq_id, tokens, 0, tuple(range(-(-length // self._block_size))))], new={seq_id: tokens})
        self._finish([seq_id])
        return seconds

    def _run(
        self,
        work: "list[tuple[int, array[int], int, tuple[int, ...]]]",
        new: "dict[int, array[int]] | None" = None,
    ) -> float:
        scheduled = tuple(
            ScheduledSequence(seq_id, tokens, start, table, True, start + len(tokens))
            for seq_id, tokens, start, table in work
        )
        added = tuple(NewSequence(seq_id, tokens, _GREEDY) for seq_id, tokens in (new or {}).items())
        batch = StepBatch(next(self._steps), scheduled, added)
        start = time.perf_counter()
        self._runner.execute(batch)
        return time.perf_counter() - start

    def _add(self, ids: list[int], tokens: "array[int]") -> None:
        new = tuple(NewSequence(seq_id, tokens, _GREEDY) for seq_id in ids)
        self._runner.execute(StepBatch(next(self._steps), (), new))

    def _finish(self, ids: list[int]) -> None:
        self._runner.execute(StepBatch(next(self._steps), (), (), tuple(ids)))

    def _tokens(self, number: int) -> "array[int]":
        return array("I", (self._random.randrange(self._vocab) for _ in range(number)))


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The report of a run, and what is needed to rate peers against the same limits."""

    report: EngineReport
    config: TransformerConfig
    dtype: torch.dtype
    scheme: WeightScheme | None
    limits: MachineLimits

    def rate(self, kind: str, size: int, seconds: float) -> Rate:
        """The rate of a case: `prefill` of `size` tokens, or `decode` of `size` sequences."""
        new, context, sequences = (size, 0, 1) if kind == "prefill" else (1, CONTEXT, size)
        needs = step_needs(self.config, self.dtype, new, context, sequences, self.scheme)
        tokens = new * sequences
        most = None if needs is None else needs.tokens_per_s(tokens, self.limits)
        rate = tokens / seconds
        return Rate(round(rate, 1), None if most is None else round(rate / most, 3))

    def task(self, path: Path) -> PeerTask:
        """The cases of this run, for peers."""
        return PeerTask(
            model=str(path),
            dtype=self.report.dtype,
            threads=self.report.threads,
            prompts=[int(length) for length in self.report.prefill],
            batches=[int(batch) for batch in self.report.decode],
            context=CONTEXT,
            decode_steps=_DECODE_STEPS,
            rounds=_PROMPT_ROUNDS,
            vocab_size=self.config.vocab_size,
        )

    def peer(self, outcome: PeerOutcome) -> PeerReport:
        """Convert a peer's times to rates."""
        times = outcome.times
        if times is None:
            return PeerReport(outcome.name, outcome.error)
        prefill = {size: self.rate("prefill", int(size), seconds) for size, seconds in times.prefill.items()}
        decode = {size: self.rate("decode", int(size), seconds) for size, seconds in times.decode.items()}
        return PeerReport(outcome.name, "", times.version, prefill, decode, times.ready_s, times.rss_mb)


def run_bench(path: Path, threads: int, weights: Weights, name: str, progress: bool, ranks: int = 1) -> EngineRun:
    """Load the model, measure every case and the machine, on the CPU. Raises ModelLoadError.

    `ranks` processes share the threads; the machine's limits are measured with all threads.
    """
    if ranks == 1:
        return _run(path, threads, threads, weights, name, progress, None)
    team = make_team(path, ranks, weights, threads, _BLOCK_SIZE)
    try:
        team.start()
        return _run(path, max(1, threads // ranks), threads, weights, name, progress, team)
    finally:
        team.close()


def _run(
    path: Path,
    rank_threads: int,
    threads: int,
    weights: Weights,
    name: str,
    progress: bool,
    team: RankTeam | None,
) -> EngineRun:
    device = select_device("cpu", rank_threads)
    device.activate_thread()
    collectives = ALONE if team is None else team.collectives
    if not progress:
        write_progress(f"engine: loading {name}")
    loaded = load_model(
        path, device=device, dtype=weights.dtype, scheme=weights.scheme, progress=progress, collectives=collectives
    )
    bench = EngineBench(loaded, device, team)
    ready_s = time.time() - psutil.Process().create_time()
    # Skip prompts that are longer than the model allows.
    prompts = [length for length in PROMPTS if length <= loaded.info.max_model_len]
    seconds: dict[tuple[str, int], float] = {}
    with case_progress("engine", len(prompts) + len(BATCHES) + 1, progress) as begin:
        for length in prompts:
            begin(f"prefill of {length} tokens")
            seconds["prefill", length] = bench.prompt(length)
        for batch in BATCHES:
            begin(f"decode of {pluralize(batch, 'sequence')}")
            seconds["decode", batch] = bench.decode(batch)
        rss_mb = psutil.Process().memory_info().rss / 1e6
        begin("limits of the machine")
        torch.set_num_threads(threads)
        limits = measure_limits(device.ops, loaded.dtype)
    report = EngineReport(
        model=name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        quantization=weights.scheme or "none",
        threads=threads,
        ranks=1 if team is None else team.size,
        ops=type(device.ops).__name__,
        machine=MachineFacts(round(limits.read_gb_s, 2), round(limits.matmul_gflop_s, 1)),
        prefill={},
        decode={},
        ready_s=round(ready_s, 2),
        rss_mb=round(rss_mb),
    )
    run = EngineRun(report, loaded.config, loaded.dtype, weights.scheme, limits)
    return replace(
        run,
        report=msgspec.structs.replace(
            report,
            prefill={str(size): run.rate("prefill", size, seconds["prefill", size]) for size in prompts},
            decode={str(size): run.rate("decode", size, seconds["decode", size]) for size in BATCHES},
        ),
    )
