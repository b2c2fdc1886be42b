"""The size of a model's KV cache per layer and token, from which the size of a piece follows. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvShape:
    """What the size of a piece follows from."""

    num_layers: int
    layer_token_bytes: int
    """Bytes of one token in one layer, all cache tensors together."""

    def layers_per_piece(self, num_tokens: int, target_bytes: int) -> int:
        """How many layers make a piece of about the target."""
        return max(1, min(self.num_layers, target_bytes // max(1, num_tokens * self.layer_token_bytes)))

    def tokens_per_piece(self, target_bytes: int) -> int:
        """How many tokens of one layer make a piece of about the target."""
        return max(1, target_bytes // self.layer_token_bytes)
