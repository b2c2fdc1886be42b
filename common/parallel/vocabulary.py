"""Embedding and head, sharded along the vocabulary into equal parts; the last one is padded with zeros.

Both are a large share of a small model and gigabytes of a large one, so no rank holds all of either. The cost is one
all-reduce and one all-gather per step. The all-reduce is exact: all parts of a row but one are zeros.
"""

from torch import Tensor
from torch.nn import functional

from kvferry.common.device.ops import Linear
from kvferry.common.parallel.collectives import Collectives


class VocabularyEmbedding:
    """token ids [T] -> rows [T, hidden]."""

    def __init__(self, rows: Tensor, collectives: Collectives) -> None:
        """`rows` [ceil(V / size), hidden]: this rank's part, padded."""
        self._rows = rows
        self._collectives = collectives
        self._start = collectives.shard.rank * len(rows)

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._collectives.shard.is_whole:
            return functional.embedding(token_ids, self._rows)
        local = token_ids - self._start
        other_ranks = (local < 0) | (local >= len(self._rows))
        rows = functional.embedding(local.masked_fill(other_ranks, 0), self._rows)
        return self._collectives.all_reduce(rows.masked_fill_(other_ranks[:, None], 0))


class VocabularyHead:
    """hidden [n, hidden] -> logits [n, vocab] in the model's dtype, the same on every rank."""

    def __init__(self, part: Linear, vocab_size: int, collectives: Collectives) -> None:
        """`part`: hidden -> this rank's part of the vocabulary, padded."""
        self._part = part
        self._vocab_size = vocab_size
        self._collectives = collectives

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._collectives.all_gather(self._part(hidden))[:, : self._vocab_size]
