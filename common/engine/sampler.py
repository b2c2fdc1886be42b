"""Samples the next token of every sequence of a step. Does no IO; device tensors reach it through `Fetch`.

State per sequence: its sampling parameters and, only if its repetition penalty is not 1, a mask of the ids seen. The
random noise is stateless: a function of (seed, absolute position, token id).
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvferry.common.base.errors import InvariantError
from kvferry.common.engine import sampling_math
from kvferry.common.engine.sampling_math import SamplingTensors
from kvferry.common.protocol.sampling_params import SamplingParams

Fetch = Callable[[Sequence[Tensor]], list[Tensor]]
"""Copies tensors to the host, complete on return. `common.engine.step_buffers.OutputBuffer` has the fast one."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The sampled tokens of a step."""

    sampled: dict[int, int] = field(default_factory=dict)
    """seq_id -> token id."""
    failed: dict[int, str] = field(default_factory=dict)
    """seq_id -> why no token could be sampled."""


@dataclass(slots=True)
class _SequenceState:
    sampling: SamplingParams
    seen: Tensor | None
    """[vocab] bool; None when the penalty is 1."""


class Sampler:
    """Vectorised over the batch; a sequence's tokens do not depend on the rest of the batch."""

    def __init__(self, vocab_size: int, fetch: Fetch | None = None) -> None:
        """`fetch`: None copies with Tensor.cpu()."""
        self._vocab_size = vocab_size
        self._fetch = fetch or _copied
        self._states: dict[int, _SequenceState] = {}

    def add(self, seq_id: int, token_ids: "array[int]", sampling: SamplingParams) -> None:
        """Add a sequence. `token_ids`: all ids known so far, prompt and output."""
        if seq_id in self._states:
            raise InvariantError(f"sequence {seq_id} was added to the sampler twice")
        seen = None
        if sampling.repetition_penalty != 1.0:
            seen = torch.zeros(self._vocab_size, dtype=torch.bool)
            seen[torch.from_numpy(np.array(token_ids, dtype=np.int64))] = True
        self._states[seq_id] = _SequenceState(sampling, seen)

    def drop(self, seq_id: int) -> None:
        """Drop a sequence's state. An unknown sequence is ignored."""
        self._states.pop(seq_id, None)

    def sample(self, seq_ids: Sequence[int], positions: Sequence[int], logits: Tensor) -> SampleResult:
        """Sample one token of each sequence.

        `positions`: absolute, of the sampled token. `logits`: [n, vocab] float32, neither changed nor retained. Only
        rows that need more than their largest logit (random or penalised ones) are copied to the host.
        """
        if not seq_ids:
            return SampleResult()
        states = [self._state(seq_id) for seq_id in seq_ids]
        fetched = [row for row, state in enumerate(states) if state.seen is not None or state.sampling.do_sample]
        greedy = logits.max(dim=1)
        largest, tokens, *others = self._fetch([*greedy, _rows(logits, fetched)] if fetched else greedy)
        host_logits = others[0] if others else logits
        if any(state.seen is not None for state in states):
            host_logits = self._penalise([states[row] for row in fetched], host_logits)
            largest[fetched], tokens[fetched] = host_logits.max(dim=1)
        # max propagates NaN; an infinite largest value leaves no distribution either.
        finite = largest.isfinite().tolist()
        random = [at for at, row in enumerate(fetched) if states[row].sampling.do_sample and finite[row]]
        if random:
            rows = [fetched[at] for at in random]
            params = [states[row].sampling for row in rows]
            tokens[rows] = self._sample_random(params, [positions[row] for row in rows], _rows(host_logits, random))
        return self._record(seq_ids, states, tokens.tolist(), finite)

    def check_invariants(self) -> None:
        """Exactly the penalised sequences have a mask, of the vocabulary's size. Raises InvariantError."""
        for seq_id, state in self._states.items():
            needed = state.sampling.repetition_penalty != 1.0
            if needed != (state.seen is not None):
                raise InvariantError(f"sequence {seq_id}: penalty and mask do not agree")
            if state.seen is not None and state.seen.shape != (self._vocab_size,):
                raise InvariantError(f"sequence {seq_id}: mask of shape {tuple(state.seen.shape)}")

    @property
    def num_sequences(self) -> int:
        return len(self._states)

    def _state(self, seq_id: int) -> _SequenceState:
        if seq_id not in self._states:
            raise InvariantError(f"sequence {seq_id} is sampled but was never added")
        return self._states[seq_id]

    def _penalise(self, states: list[_SequenceState], logits: Tensor) -> Tensor:
        rows = [row for row, state in enumerate(states) if state.seen is not None]
        seen = torch.stack([state.seen for state in states if state.seen is not None])
        penalty = torch.tensor([states[row].sampling.repetition_penalty for row in rows], dtype=torch.float32)
        if len(rows) == len(states):
            return sampling_math.apply_repetition_penalty(logits, seen, penalty)
        logits = logits.clone()
        logits[rows] = sampling_math.apply_repetition_penalty(logits[rows], seen, penalty)
        return logits

    def _sample_random(self, params: list[SamplingParams], positions: list[int], logits: Tensor) -> Tensor:
        vocab = self._vocab_size
        tensors = SamplingTensors(
            temperature=torch.tensor([one.temperature for one in params], dtype=torch.float64),
            top_k=torch.tensor([min(one.top_k or vocab, vocab) for one in params]),
            top_p=torch.tensor([one.top_p for one in params], dtype=torch.float64),
            seeds=np.array([one.seed for one in params], dtype=np.uint64),
            positions=np.array(positions, dtype=np.uint64),
        )
        return sampling_math.sample(logits, tensors)

    def _record(
        self, seq_ids: Sequence[int], states: list[_SequenceState], tokens: list[int], finite: list[bool]
    ) -> SampleResult:
        result = SampleResult()
        for seq_id, state, token, good in zip(seq_ids, states, tokens, finite, strict=True):
            if not good:
                result.failed[seq_id] = "the model returned logits that are not finite"
                continue
            result.sampled[seq_id] = token
            if state.seen is not None:
                state.seen[token] = True
        return result


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


def _rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Select rows, in order; returns the tensor itself if all are selected."""
    return logits if len(rows) == len(logits) else logits[list(rows)]
