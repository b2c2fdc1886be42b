"""The KV cache of a model as the hand-over sees it: the unit of a transfer and its size in bytes. Pure.

A model's cache is a list of components, the same in every layer, for each token. A component has a name, a shape (per
token) and a dtype: `key` and `value`, or `latent` and `rope_key` for latent attention. The hand-over does not
interpret components. It counts layers, tokens and bytes; the wire order of a piece is
[layer, component, token, per-token shape] (`BlockBytes`). Names and shapes are in `Compatibility.kv_layout` and the
first component's dtype is `kv_dtype`, so nodes with different caches refuse each other at Hello.

There are no components per sequence (a recurrent or convolution state, which does not grow with tokens). A model with
one needs a unit next to the pieces: sent once, after the last token, and not by a range of tokens.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvShape:
    """The extent of the cache; the size of a piece follows from it."""

    num_layers: int
    layer_token_bytes: int
    """Bytes of one token in one layer, summed over all components."""

    def layers_per_piece(self, num_tokens: int, target_bytes: int) -> int:
        """Number of layers of num_tokens tokens that make a piece of about target_bytes; at least 1."""
        return max(1, min(self.num_layers, target_bytes // max(1, num_tokens * self.layer_token_bytes)))

    def tokens_per_piece(self, target_bytes: int) -> int:
        """Number of tokens of one layer that make a piece of about target_bytes; at least 1."""
        return max(1, target_bytes // self.layer_token_bytes)
