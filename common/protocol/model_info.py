"""What a node publishes about its model: enough for a router to check requests and for peers to compare. Plain data."""

from collections.abc import Sequence

import msgspec

from kvferry.common.base.ranges import Count, TokenId


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model's limits and defaults, as the router needs them to check a request."""

    name: str
    vocab_size: Count
    max_model_len: Count
    """Prompt and output together, in tokens; the node's setting."""
    max_position_embeddings: Count
    eos_token_ids: tuple[TokenId, ...] = ()
    default_top_k: Count = 1000
    default_do_sample: bool = False
    tokenizer_path: str = ""
    """A path a router on the same host may load a tokenizer from; empty where there is none."""


def strictest(models: Sequence[ModelInfo]) -> ModelInfo:
    """The limits that all of these models accept: the first one with the least of their limits."""
    return msgspec.structs.replace(
        models[0],
        vocab_size=min(model.vocab_size for model in models),
        max_model_len=min(model.max_model_len for model in models),
        max_position_embeddings=min(model.max_position_embeddings for model in models),
    )


TokenSource = tuple[str, str]
"""Digest of the model and the dtype: equal sources continue a stream with the same tokens."""


class Compatibility(msgspec.Struct, frozen=True, kw_only=True):
    """What two nodes must have in common before KV may pass between them. Compared at Hello, field by field."""

    protocol_version: Count
    model: str
    """Digest of the architecture, its configuration and the weights' identity."""
    kv_dtype: str
    kv_layout: str
    """The cache tensors in wire order, with their shapes per token; the physical layout is the device's own."""
    block_size: Count
    num_layers: Count
    tensor_parallel: Count = 1
    """Rank i sends to rank i."""
    weights: str = ""
    """Version of the weights: a digest of their files. Part of `model` too; by itself it says what differs."""
    cache_salt: str = ""
    """Part of the identity of all prefix blocks of the node. Empty: none (none yet)."""
    adapter: str = ""
    """Name of the adapter that is served. Empty: none (none yet)."""

    @property
    def token_source(self) -> TokenSource:
        """A stream may continue on any node with the same source; the other fields describe how the KV is laid out."""
        return self.model, self.kv_dtype

    def difference(self, other: "Compatibility") -> str | None:
        """The first field that differs, as `field: mine != theirs`; None when all agree."""
        for field in self.__struct_fields__:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{field}: {mine} != {theirs}"
        return None
