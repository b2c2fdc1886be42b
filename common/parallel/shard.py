"""Which part of a model each rank has. Pure.

Sharding follows Megatron-LM (Shoeybi et al., 2019): heads and the MLP's intermediate size are divided, so that each
layer needs one all-reduce after its attention and one after its MLP.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which samples, and adds terms (such as biases) that must be added once."""
        return self.rank == 0

    def span(self, total: int) -> tuple[int, int]:
        """[start, end) of this rank's part. If `total` does not divide, the last ranks' parts are shorter."""
        each = -(-total // self.size)
        return min(self.rank * each, total), min((self.rank + 1) * each, total)


WHOLE = Shard()
