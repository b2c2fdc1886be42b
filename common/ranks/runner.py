"""Steps on several ranks: rank 0 passes each plan on before it computes its own part; the others draw nothing."""

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

    What it reports of layers holds for every rank: a layer's attention ends with a sum to which each rank comes after
    it has written its KV of that layer. So does the end of a step, for its copies come first; after one of nothing but
    copies there is such a sum too.
    """

    def __init__(self, own: ModelRunner, pass_on: Callable[[StepBatch], None]) -> None:
        self._own = own
        self._pass_on = pass_on

    def execute(self, plan: StepBatch, on_layers_done: OnLayersDone | None = None) -> StepResult:
        """See ModelRunner. RuntimeError when another rank is gone."""
        if plan.scheduled or plan.has_copies:
            # The samplers' part stays here.
            self._pass_on(replace(plan, new=(), finished=(), report_layers=False))
        return self._own.execute(plan, on_layers_done)

    def check_invariants(self) -> None:
        """Those of this rank's own part."""
        self._own.check_invariants()


class SilentSampler:
    """Implements TokenSampler where nothing is drawn: rank 0 does that for all."""

    def add(self, seq_id: int, token_ids: "array[int]", sampling: SamplingParams) -> None:
        """Nothing is kept."""

    def drop(self, seq_id: int) -> None:
        """There is nothing to forget."""

    def sample(self, seq_ids: Sequence[int], positions: Sequence[int], logits: Tensor) -> SampleResult:
        """No token."""
        return SampleResult()

    def check_invariants(self) -> None:
        """There is no state."""
