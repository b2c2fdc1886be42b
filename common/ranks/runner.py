"""Steps over several ranks: rank 0 broadcasts each batch before it computes its own part. Only rank 0 samples."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from kvferry.common.engine.runner import ModelRunner, OnLayersDone
from kvferry.common.engine.sampler import SampleResult
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.step import StepBatch, StepResult


class LeadRunner:
    """Rank 0's StepRunner.

    Its layer reports hold for every rank: a layer's attention ends with an all-reduce that each rank enters after it
    has written its KV of that layer. The same holds for the copies of a step, which come first; a step of copies alone
    ends with an all-reduce too.
    """

    def __init__(self, local: ModelRunner, broadcast: Callable[[StepBatch], None]) -> None:
        self._local = local
        self._broadcast = broadcast

    def execute(self, batch: StepBatch, on_layers_done: OnLayersDone | None = None) -> StepResult:
        """As ModelRunner.execute. Raises RuntimeError when another rank is lost."""
        if batch.scheduled or batch.has_copies:
            # The other ranks do not sample and report no layers.
            self._broadcast(replace(batch, new=(), finished=(), report_layers=False))
        return self._local.execute(batch, on_layers_done)

    def check_invariants(self) -> None:
        """Check rank 0's part. Raises InvariantError."""
        self._local.check_invariants()


class SilentSampler:
    """Implements TokenSampler for the ranks that do not sample: keeps no state and returns no tokens."""

    def add(self, seq_id: int, token_ids: "array[int]", sampling: SamplingParams) -> None:
        pass

    def drop(self, seq_id: int) -> None:
        pass

    def sample(self, seq_ids: Sequence[int], positions: Sequence[int], logits: Tensor) -> SampleResult:
        return SampleResult()

    def check_invariants(self) -> None:
        pass
