"""Which part of a model one rank has. Pure.

The cut is Megatron's (Shoeybi et al., "Megatron-LM", 2019): heads and the MLP's inner size are divided, so that each
layer needs one sum over the ranks behind its attention and one behind its MLP.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.config import TransformerConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing to cut."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0: the one that draws, and that adds what must be added once."""
        return self.rank == 0

    def span(self, total: int) -> tuple[int, int]:
        """[start, end) of this rank's equal part. The last ranks' parts are shorter where `total` does not divide."""
        each = -(-total // self.size)
        return min(self.rank * each, total), min((self.rank + 1) * each, total)

    def local(self, config: TransformerConfig) -> TransformerConfig:
        """The configuration with this rank's number of heads; everything else is the model's own."""
        return replace(config, num_heads=config.num_heads // self.size, num_kv_heads=config.num_kv_heads // self.size)

    def check(self, config: TransformerConfig) -> None:
        """Raises ModelLoadError, by name, for a size that does not divide."""
        for name, value in _divided(config):
            if value % self.size:
                raise ModelLoadError(
                    f"node.tensor_parallel = {self.size}: the model's {name} is {value}, which does not divide by "
                    f"{self.size}"
                )


WHOLE = Shard()


def _divided(config: TransformerConfig) -> Iterator[tuple[str, int]]:
    """The sizes that are cut, by the names that configurations have for them."""
    yield "num_attention_heads", config.num_heads
    if config.mla is None:
        yield "num_key_value_heads", config.num_kv_heads
    moe = config.moe
    if moe is None or len(moe.layers) < config.num_layers:
        yield "intermediate_size", config.intermediate_size
    if moe is not None:
        yield "moe_intermediate_size", moe.intermediate_size
        if moe.shared_intermediate_size:
            yield "shared experts' size", moe.shared_intermediate_size
