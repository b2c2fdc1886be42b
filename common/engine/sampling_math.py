"""The draw of tokens for a batch, as functions of tensors. Every row's result depends on that row alone.

Nothing here may sum floats in an order that depends on the batch, the threads, or how many candidates other rows keep:
probabilities are added up by a running sum in float64, in the order of the candidates, which is unique.
"""

import torch
from torch import Tensor

_FIRST_CANDIDATES = 1024
"""How many of the best tokens top-p looks at before it sorts the whole vocabulary."""
_BELOW_ONE = 1.0 - 2.0**-53


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """logits [n, V] float32, seen [n, V] bool, penalty [n]: seen logits > 0 divided by it, the others multiplied."""
    penalty = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """logits [n, V] float32, temperature, top_p and noise [n] float64, top_k [n] int64 in 1 to V -> ids [n].

    The kept tokens are those of the k largest logits, of ties the lowest ids; of these the fewest, best first, that
    reach a share of top_p together. noise in (0, 1) then picks by inverse cumulative distribution.
    """
    vocab = logits.shape[1]
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    limited = top_k < vocab
    plain = ~limited & (top_p >= 1.0)
    nucleus = ~limited & ~plain
    for rows, pick in ((plain, _draw_plain), (limited, _draw_limited), (nucleus, _draw_nucleus)):
        index = rows.nonzero().flatten()
        if index.numel():
            out[index] = pick(logits[index], temperature[index], top_k[index], top_p[index], noise[index])
    return out


def _draw_plain(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """The whole vocabulary: in order of ids, nothing is sorted."""
    running = _weights(logits, logits.amax(1), temperature).cumsum(1)
    return _invert(running, running[:, -1], noise)


def _draw_limited(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """top_k below the vocabulary's size, and top_p of what it leaves."""
    ids = _best(logits, int(top_k.max()))
    values = logits.gather(1, ids)
    weights = _weights(values, values[:, 0], temperature)
    weights *= torch.arange(ids.shape[1])[None] < top_k[:, None]
    running = weights.cumsum(1)
    kept = _nucleus_mass(running, running[:, -1], top_p)
    return ids.gather(1, _invert(running, kept, noise)[:, None])[:, 0]


def _draw_nucleus(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """top_p of the whole vocabulary. A row whose nucleus is not among the first candidates is sorted wholly."""
    total = _weights(logits, logits.amax(1), temperature).cumsum(1)[:, -1]
    out = torch.empty_like(top_k)
    pending = torch.arange(logits.shape[0])
    for candidates in (min(_FIRST_CANDIDATES, logits.shape[1]), logits.shape[1]):
        ids = _best(logits[pending], candidates)
        values = logits[pending].gather(1, ids)
        running = _weights(values, values[:, 0], temperature[pending]).cumsum(1)
        wanted = total[pending] * top_p[pending]
        done = (running[:, -1] >= wanted) | torch.tensor(candidates == logits.shape[1])
        kept = _nucleus_mass(running[done], total[pending][done], top_p[pending][done])
        picked = _invert(running[done], kept, noise[pending][done])
        out[pending[done]] = ids[done].gather(1, picked[:, None])[:, 0]
        pending = pending[~done]
        if not pending.numel():
            break
    return out


def _best(logits: Tensor, count: int) -> Tensor:
    """[n, count] ids by falling logit, equal ones by rising id.

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


def _nucleus_mass(running: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """[n] the running sum at the first candidate that reaches top_p * total (the last one where rounding hides it)."""
    crossing = torch.searchsorted(running, (total * top_p)[:, None]).clamp_(max=running.shape[1] - 1)
    return running.gather(1, crossing)[:, 0]


def _invert(running: Tensor, mass: Tensor, noise: Tensor) -> Tensor:
    """[n] the first index whose running sum exceeds noise * mass; never one of weight zero."""
    target = torch.minimum(noise * mass, mass * _BELOW_ONE)
    return torch.searchsorted(running, target[:, None], right=True)[:, 0]
