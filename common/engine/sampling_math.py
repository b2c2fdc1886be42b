"""The draw of tokens for a batch, as functions of tensors. Every row's result depends on that row alone.

The draw is a race: of the kept tokens the one whose logit / temperature + Gumbel noise is largest, with noise fixed by
(seed, position, token id). That is a draw by softmax (Gumbel 1954; the "Gumbel-max trick"). Other than the inverse of a
cumulative sum it hardly feels the last bits of logits, which may differ when a token is computed in another batch.
What is kept depends on sums; they are taken in float64, in the order of the candidates, which is unique.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvferry.common.engine import philox

_FIRST_CANDIDATES = 1024
"""How many of the best tokens top-p looks at before it sorts the whole vocabulary."""


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """logits [n, V] float32, seen [n, V] bool, penalty [n]: seen logits > 0 divided by it, the others multiplied."""
    penalty = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How each of n rows is drawn."""

    temperature: Tensor
    """[n] float64."""
    top_k: Tensor
    """[n] int64, 1 to the vocabulary's size."""
    top_p: Tensor
    """[n] float64."""
    seeds: NDArray[np.uint64]
    positions: NDArray[np.uint64]

    def rows(self, index: Tensor) -> "DrawParams":
        """Those of some rows."""
        at = index.numpy()
        return DrawParams(
            self.temperature[index], self.top_k[index], self.top_p[index], self.seeds[at], self.positions[at]
        )


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """logits [n, V] float32 -> ids [n].

    The kept tokens are those of the k largest logits, of ties the lowest ids; of these the fewest, best first, that
    reach a share of top_p together.
    """
    vocab = logits.shape[1]
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    limited = params.top_k < vocab
    plain = ~limited & (params.top_p >= 1.0)
    nucleus = ~limited & ~plain
    for rows, pick in ((plain, _draw_plain), (limited, _draw_limited), (nucleus, _draw_nucleus)):
        index = rows.nonzero().flatten()
        if index.numel():
            out[index] = pick(logits[index], params.rows(index))
    return out


def _draw_plain(logits: Tensor, params: DrawParams) -> Tensor:
    """The whole vocabulary: nothing is sorted. Row by row, so that the noise stays in the processor's cache."""
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    for row, values in enumerate(logits):
        seed, position = int(params.seeds[row]), int(params.positions[row])
        noise = torch.from_numpy(philox.gumbel(philox.uniform_of_all(seed, position, values.shape[0])))
        out[row] = (values.double() / params.temperature[row] + noise).argmax()
    return out


def _draw_limited(logits: Tensor, params: DrawParams) -> Tensor:
    """top_k below the vocabulary's size, and top_p of what it leaves."""
    ids = _best(logits, int(params.top_k.max()))
    values = logits.gather(1, ids)
    within = torch.arange(ids.shape[1])[None] < params.top_k[:, None]
    running = (_weights(values, values[:, 0], params.temperature) * within).cumsum(1)
    return _race(values, ids, within & _nucleus(running, running[:, -1], params.top_p), params)


def _draw_nucleus(logits: Tensor, params: DrawParams) -> Tensor:
    """top_p of the whole vocabulary. A row whose nucleus is not among the first candidates is sorted wholly."""
    vocab = logits.shape[1]
    total = _weights(logits, logits.amax(1), params.temperature).cumsum(1)[:, -1]
    out = torch.empty_like(params.top_k)
    pending = torch.arange(logits.shape[0])
    for candidates in (min(_FIRST_CANDIDATES, vocab), vocab):
        some = params.rows(pending)
        ids = _best(logits[pending], candidates)
        values = logits[pending].gather(1, ids)
        running = _weights(values, values[:, 0], some.temperature).cumsum(1)
        done = (running[:, -1] >= total[pending] * some.top_p) | torch.tensor(candidates == vocab)
        kept = _nucleus(running[done], total[pending][done], some.top_p[done])
        out[pending[done]] = _race(values[done], ids[done], kept, some.rows(done.nonzero().flatten()))
        pending = pending[~done]
        if not pending.numel():
            break
    return out


def _race(values: Tensor, ids: Tensor, kept: Tensor, params: DrawParams) -> Tensor:
    """values and ids [n, C], kept [n, C] bool, of each row a first part -> the id of each row that wins."""
    if not values.shape[0]:
        return torch.empty(0, dtype=torch.int64)
    used = int(kept.sum(1).max())
    values, ids, kept = values[:, :used], ids[:, :used], kept[:, :used]
    uniform = philox.uniform(params.seeds[:, None], params.positions[:, None], ids.numpy().astype(np.uint64))
    score = values.double() / params.temperature[:, None] + torch.from_numpy(philox.gumbel(uniform))
    winner = score.masked_fill(~kept, -torch.inf).argmax(1)
    return ids.gather(1, winner[:, None])[:, 0]


def _best(logits: Tensor, count: int) -> Tensor:
    """[n, count] ids by falling logit, equal ones by rising id: unique, however top-k is computed."""
    values, ids = logits.topk(count, dim=1)
    last = values[:, -1:]
    if count < logits.shape[1] and bool(((logits == last).sum(1) > (values == last).sum(1)).any()):
        return _best_of_ties(logits, count)
    # All of the boundary's ties are in: only their order is left to settle.
    ids = ids.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _best_of_ties(logits: Tensor, count: int) -> Tensor:
    """The same where more tokens share the last logit than there is room for.

    A float's bits, read as a whole number, order like the float; with the id below them every key is unique, so the
    order does not depend on how top-k is computed.
    """
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    ids = torch.arange(logits.shape[1])
    keys = (ordered << 32) | (0xFFFFFFFF - ids)[None]
    return 0xFFFFFFFF - (keys.topk(count, dim=1).values & 0xFFFFFFFF)


def _weights(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - largest) / temperature) in float64; the sum is taken elsewhere."""
    return ((logits.double() - largest.double()[:, None]) / temperature[:, None]).exp()


def _nucleus(running: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """[n, C] bool: up to the first candidate at which the running sum reaches top_p * total, or all of them."""
    crossing = torch.searchsorted(running, (total * top_p)[:, None])
    return torch.arange(running.shape[1])[None] <= crossing
