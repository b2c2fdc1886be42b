"""Temperature, top-k, top-p and sampling of a batch, as pure functions of tensors. Rows are independent.

Sampling uses the Gumbel-max trick (Gumbel 1954): of the retained tokens, take the one with the largest
logit / temperature + Gumbel noise, with noise fixed by (seed, position, token id). This samples from the softmax.
Unlike inverting a cumulative sum, it is insensitive to the last bits of the logits, which may differ when a token is
computed in another batch. The retained set depends on sums, so these are taken in float64 and in the candidates' order,
which is unique.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvferry.common.engine import philox

_FIRST_CANDIDATES = 1024
"""Number of the most likely tokens that top-p examines before it sorts the whole vocabulary."""


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Divide positive logits of seen tokens by the penalty, multiply the non-positive ones by it.

    logits [n, V] float32, seen [n, V] bool, penalty [n].
    """
    penalty = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of n rows."""

    temperature: Tensor
    """[n] float64."""
    top_k: Tensor
    """[n] int64, 1 to the vocabulary's size."""
    top_p: Tensor
    """[n] float64."""
    seeds: NDArray[np.uint64]
    positions: NDArray[np.uint64]

    def rows(self, index: Tensor) -> "SamplingTensors":
        at = index.numpy()
        return SamplingTensors(
            self.temperature[index], self.top_k[index], self.top_p[index], self.seeds[at], self.positions[at]
        )


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """logits [n, V] float32 -> ids [n].

    Retained are the tokens of the k largest logits (the lowest ids among equal logits), and of these the smallest
    most-likely-first set whose probabilities add up to top_p.
    """
    vocab = logits.shape[1]
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    top_k = params.top_k < vocab
    unrestricted = ~top_k & (params.top_p >= 1.0)
    top_p = ~top_k & ~unrestricted
    for rows, method in ((unrestricted, _sample_all), (top_k, _sample_top_k), (top_p, _sample_top_p)):
        index = rows.nonzero().flatten()
        if index.numel():
            out[index] = method(logits[index], params.rows(index))
    return out


def _sample_all(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Sample from the whole vocabulary without sorting. Row by row, so that the noise stays in the CPU cache."""
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    for row, values in enumerate(logits):
        seed, position = int(params.seeds[row]), int(params.positions[row])
        noise = torch.from_numpy(philox.gumbel(philox.uniform_of_all(seed, position, values.shape[0])))
        out[row] = (values.double() / params.temperature[row] + noise).argmax()
    return out


def _sample_top_k(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Sample with top_k below the vocabulary's size, and top_p of the tokens it retains."""
    ids = _top_ids(logits, int(params.top_k.max()))
    values = logits.gather(1, ids)
    in_top_k = torch.arange(ids.shape[1])[None] < params.top_k[:, None]
    cumulative = (_weights(values, values[:, 0], params.temperature) * in_top_k).cumsum(1)
    return _gumbel_max(values, ids, in_top_k & _nucleus(cumulative, cumulative[:, -1], params.top_p), params)


def _sample_top_p(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Sample with top_p of the whole vocabulary. A row is fully sorted only if its nucleus exceeds the candidates."""
    vocab = logits.shape[1]
    total = _weights(logits, logits.amax(1), params.temperature).cumsum(1)[:, -1]
    out = torch.empty_like(params.top_k)
    pending = torch.arange(logits.shape[0])
    for candidates in (min(_FIRST_CANDIDATES, vocab), vocab):
        pending_params = params.rows(pending)
        ids = _top_ids(logits[pending], candidates)
        values = logits[pending].gather(1, ids)
        cumulative = _weights(values, values[:, 0], pending_params.temperature).cumsum(1)
        done = (cumulative[:, -1] >= total[pending] * pending_params.top_p) | torch.tensor(candidates == vocab)
        retained = _nucleus(cumulative[done], total[pending][done], pending_params.top_p[done])
        done_params = pending_params.rows(done.nonzero().flatten())
        out[pending[done]] = _gumbel_max(values[done], ids[done], retained, done_params)
        pending = pending[~done]
        if not pending.numel():
            break
    return out


def _gumbel_max(values: Tensor, ids: Tensor, retained: Tensor, params: SamplingTensors) -> Tensor:
    """values and ids [n, C], retained [n, C] bool, a prefix of each row -> the sampled id of each row, [n]."""
    if not values.shape[0]:
        return torch.empty(0, dtype=torch.int64)
    used = int(retained.sum(1).max())
    values, ids, retained = values[:, :used], ids[:, :used], retained[:, :used]
    uniform = philox.uniform(params.seeds[:, None], params.positions[:, None], ids.numpy().astype(np.uint64))
    score = values.double() / params.temperature[:, None] + torch.from_numpy(philox.gumbel(uniform))
    winner = score.masked_fill(~retained, -torch.inf).argmax(1)
    return ids.gather(1, winner[:, None])[:, 0]


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """[n, count] ids by descending logit, ties by ascending id: unique, however torch computes top-k."""
    values, ids = logits.topk(count, dim=1)
    last = values[:, -1:]
    if count < logits.shape[1] and bool(((logits == last).sum(1) > (values == last).sum(1)).any()):
        return _top_ids_with_ties(logits, count)
    # All ties at the boundary are included: only their order is left to fix.
    ids = ids.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _top_ids_with_ties(logits: Tensor, count: int) -> Tensor:
    """`_top_ids` when more tokens share the last logit than fit.

    A float's bits, read as an integer, sort like the float; with the id in the low bits every key is unique, so the
    order does not depend on how torch computes top-k.
    """
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    ids = torch.arange(logits.shape[1])
    keys = (ordered << 32) | (0xFFFFFFFF - ids)[None]
    return 0xFFFFFFFF - (keys.topk(count, dim=1).values & 0xFFFFFFFF)


def _weights(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised exp((logits - largest) / temperature) in float64."""
    return ((logits.double() - largest.double()[:, None]) / temperature[:, None]).exp()


def _nucleus(cumulative: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """[n, C] bool: candidates up to the first at which the cumulative sum reaches top_p * total, or all of them."""
    crossing = torch.searchsorted(cumulative, (total * top_p)[:, None])
    return torch.arange(cumulative.shape[1])[None] <= crossing
