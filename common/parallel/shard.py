"""Which part of a model each rank has. Pure.

Sharding follows Megatron-LM (Shoeybi et al., 2019): heads and the MLP's intermediate size are divided, so that each
layer needs one all-reduce after its attention and one after its MLP.
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
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which samples, and adds terms (such as biases) that must be added once."""
        return self.rank == 0

    def span(self, total: int) -> tuple[int, int]:
        """[start, end) of this rank's part. If `total` does not divide, the last ranks' parts are shorter."""
        each = -(-total // self.size)
        return min(self.rank * each, total), min((self.rank + 1) * each, total)

    def local(self, config: TransformerConfig) -> TransformerConfig:
        """The configuration with this rank's number of heads; all other values are the whole model's."""
        return replace(config, num_heads=config.num_heads // self.size, num_kv_heads=config.num_kv_heads // self.size)

    def check(self, config: TransformerConfig) -> None:
        """Raises ModelLoadError with the name of a size that does not divide by the number of ranks."""
        for name, value in _sharded_sizes(config):
            if value % self.size:
                raise ModelLoadError(
                    f"node.tensor_parallel = {self.size}: the model's {name} is {value}, which is not divisible by "
                    f"{self.size}; choose a number of ranks that divides it"
                )


WHOLE = Shard()


def _sharded_sizes(config: TransformerConfig) -> Iterator[tuple[str, int]]:
    """The sizes that are divided, with their names in config.json."""
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
