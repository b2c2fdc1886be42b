"""Chooses the next token of every sampled sequence of a step, and keeps what that needs from step to step.

State per sequence: its sampling parameters and, only when its repetition penalty is not 1, which ids it has seen. The
random part has none: noise is a function of (seed, absolute position, token id).
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvferry.common.base.errors import InvariantError
from kvferry.common.engine import sampling_math
from kvferry.common.engine.sampling_math import DrawParams
from kvferry.common.protocol.sampling_params import SamplingParams

Fetch = Callable[[Sequence[Tensor]], list[Tensor]]
"""Brings tensors to the host; they are there when it returns. `common.engine.staging.Landing` has the fast one."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The tokens of a step."""

    sampled: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _SequenceState:
    sampling: SamplingParams
    seen: Tensor | None
    """[vocab] bool; None when the penalty is 1."""


class Sampler:
    """Vectorised over the batch; a sequence's tokens do not depend on what else is in it."""

    def __init__(self, vocab_size: int, fetch: Fetch | None = None) -> None:
        """`fetch`: None copies them as they are."""
        self._vocab_size = vocab_size
        self._fetch = fetch or _copied
        self._states: dict[int, _SequenceState] = {}

    def add(self, seq_id: int, token_ids: "array[int]", sampling: SamplingParams) -> None:
        """Meet a sequence. `token_ids`: all ids known so far, prompt and output."""
        if seq_id in self._states:
            raise InvariantError(f"sequence {seq_id} was added to the sampler twice")
        seen = None
        if sampling.repetition_penalty != 1.0:
            seen = torch.zeros(self._vocab_size, dtype=torch.bool)
            seen[torch.from_numpy(np.array(token_ids, dtype=np.int64))] = True
        self._states[seq_id] = _SequenceState(sampling, seen)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence; one that is not there is no fault."""
        self._states.pop(seq_id, None)

    def sample(self, seq_ids: Sequence[int], positions: Sequence[int], logits: Tensor) -> SampleResult:
        """Draw one token each. positions: absolute, of the token drawn; logits [n, vocab] float32, not kept.

        Only what needs more than the largest logit has its logits brought to the host.
        """
        if not seq_ids:
            return SampleResult()
        states = [self._state(seq_id) for seq_id in seq_ids]
        apart = [row for row, state in enumerate(states) if state.seen is not None or state.sampling.do_sample]
        wanted = logits.max(dim=1)
        largest, tokens, *others = self._fetch([*wanted, _rows(logits, apart)] if apart else wanted)
        rows = others[0] if others else logits
        if any(state.seen is not None for state in states):
            rows = self._penalised([states[row] for row in apart], rows)
            largest[apart], tokens[apart] = rows.max(dim=1)
        # max propagates not-a-number; an infinite largest value leaves no distribution either.
        finite = largest.isfinite().tolist()
        random = [at for at, row in enumerate(apart) if states[row].sampling.do_sample and finite[row]]
        if random:
            drawn = [apart[at] for at in random]
            chosen = [states[row].sampling for row in drawn]
            tokens[drawn] = self._draw(chosen, [positions[row] for row in drawn], _rows(rows, random))
        return self._record(seq_ids, states, tokens.tolist(), finite)

    def check_invariants(self) -> None:
        """A seen mask exactly where a penalty needs one, of the vocabulary's size. Raises InvariantError."""
        for seq_id, state in self._states.items():
            needed = state.sampling.repetition_penalty != 1.0
            if needed != (state.seen is not None):
                raise InvariantError(f"sequence {seq_id}: penalty and mask do not agree")
            if state.seen is not None and state.seen.shape != (self._vocab_size,):
                raise InvariantError(f"sequence {seq_id}: mask of shape {tuple(state.seen.shape)}")

    @property
    def num_sequences(self) -> int:
        """How many sequences it keeps state for."""
        return len(self._states)

    def _state(self, seq_id: int) -> _SequenceState:
        if seq_id not in self._states:
            raise InvariantError(f"sequence {seq_id} is sampled but was never added")
        return self._states[seq_id]

    def _penalised(self, states: list[_SequenceState], logits: Tensor) -> Tensor:
        rows = [row for row, state in enumerate(states) if state.seen is not None]
        seen = torch.stack([state.seen for state in states if state.seen is not None])
        penalty = torch.tensor([states[row].sampling.repetition_penalty for row in rows], dtype=torch.float32)
        if len(rows) == len(states):
            return sampling_math.penalise(logits, seen, penalty)
        logits = logits.clone()
        logits[rows] = sampling_math.penalise(logits[rows], seen, penalty)
        return logits

    def _draw(self, chosen: list[SamplingParams], positions: list[int], logits: Tensor) -> Tensor:
        vocab = self._vocab_size
        params = DrawParams(
            temperature=torch.tensor([params.temperature for params in chosen], dtype=torch.float64),
            top_k=torch.tensor([min(params.top_k or vocab, vocab) for params in chosen]),
            top_p=torch.tensor([params.top_p for params in chosen], dtype=torch.float64),
            seeds=np.array([params.seed for params in chosen], dtype=np.uint64),
            positions=np.array(positions, dtype=np.uint64),
        )
        return sampling_math.draw(logits, params)

    def _record(
        self, seq_ids: Sequence[int], states: list[_SequenceState], tokens: list[int], finite: list[bool]
    ) -> SampleResult:
        result = SampleResult()
        for seq_id, state, token, good in zip(seq_ids, states, tokens, finite, strict=True):
            if not good:
                result.failed[seq_id] = "the model gave logits that are not finite"
                continue
            result.sampled[seq_id] = token
            if state.seen is not None:
                state.seen[token] = True
        return result


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


def _rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Some of the rows, in order: the tensor itself where that is all."""
    return logits if len(rows) == len(logits) else logits[list(rows)]
