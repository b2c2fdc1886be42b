"""Embedding and head, cut along the vocabulary: each rank has as many rows, the last ones filled up with zeros.

Both are a large share of a small model and gigabytes of a large one, so no rank holds all of either. The price is one
sum and one gathering a step. The sum is exact: all parts of a row but one are zeros.
"""

from torch import Tensor
from torch.nn import functional

from kvferry.common.device.ops import Linear
from kvferry.common.parallel.collectives import Collectives


class VocabularyEmbedding:
    """token ids [T] -> rows [T, hidden]."""

    def __init__(self, rows: Tensor, collectives: Collectives) -> None:
        """`rows` [V / size, hidden]: this rank's part, filled up."""
        self._rows = rows
        self._collectives = collectives
        self._start = collectives.shard.rank * len(rows)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """See the class."""
        if self._collectives.shard.is_whole:
            return functional.embedding(token_ids, self._rows)
        local = token_ids - self._start
        elsewhere = (local < 0) | (local >= len(self._rows))
        found = functional.embedding(local.masked_fill(elsewhere, 0), self._rows)
        return self._collectives.sum(found.masked_fill_(elsewhere[:, None], 0))


class VocabularyHead:
    """hidden [n, hidden] -> logits [n, vocab] in the model's dtype, the same on every rank."""

    def __init__(self, part: Linear, vocab_size: int, collectives: Collectives) -> None:
        """`part`: hidden -> this rank's rows, filled up."""
        self._part = part
        self._vocab_size = vocab_size
        self._collectives = collectives

    def __call__(self, hidden: Tensor) -> Tensor:
        """See the class."""
        return self._collectives.side_by_side(self._part(hidden))[:, : self._vocab_size]
