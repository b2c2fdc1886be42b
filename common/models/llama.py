"""The Llama family: grouped heads, rotary embedding, gated MLP. Merged projections, packed once for the device.

Llama 1 to 3.3, SmolLM and everything else whose config says LlamaForCausalLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from common.device.base import AttentionMetadata, Device, KvTensorSpec, Linear, Ops
from common.models.causal_lm import LayerDone
from common.models.config import ModelConfig
from common.models.rope import cos_sin, inverse_frequencies
from common.models.weights import ROPE_FACTORS, TrackedWeights


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One decoder layer's weights, ready to use."""

    input_norm: Tensor
    qkv: Linear
    """[T, hidden] -> [T, (heads + 2 * kv_heads) * head_dim]."""
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    """[T, hidden] -> [T, 2 * intermediate]."""
    down: Linear


class LlamaModel:
    """Implements `common.models.causal_lm.CausalLM`."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Tensor,
        layers: Sequence[LlamaLayer],
        final_norm: Tensor,
        head: Linear,
        frequencies: Tensor,
    ) -> None:
        self.config = config
        shape = (config.num_kv_heads, config.head_dim)
        self.kv_specs: tuple[KvTensorSpec, ...] = (
            KvTensorSpec("key", shape, embedding.dtype),
            KvTensorSpec("value", shape, embedding.dtype),
        )
        self._ops = ops
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        self._frequencies = frequencies
        self._scale = config.head_dim**-0.5

    @classmethod
    def load(cls, config: ModelConfig, weights: TrackedWeights, device: Device, dtype: torch.dtype) -> Self:
        """Take every weight, merge, convert and pack. Raises ModelLoadError for one that is missing or left over."""
        loader = _Loader(config, weights, device, dtype)
        embedding = loader.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [loader.layer(index) for index in range(config.num_layers)]
        final_norm = loader.tensor("model.norm.weight", config.hidden_size)
        return cls(
            config,
            device.ops,
            embedding,
            layers,
            final_norm,
            loader.head(embedding),
            loader.frequencies().to(device.torch_device),
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[tuple[Tensor, ...]],
        meta: AttentionMetadata,
        on_layer: LayerDone | None = None,
    ) -> Tensor:
        """token_ids and positions [T] int64 -> hidden states [T, hidden] before the last norm."""
        ops, eps = self._ops, self.config.rms_norm_eps
        cos, sin = cos_sin(positions, self._frequencies, self.config.rope.attention_factor)
        residual = functional.embedding(token_ids, self._embedding)
        # The first layer's norm stands alone; every later one is fused with the addition before it.
        hidden = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            if index:
                hidden, residual = ops.add_rms_norm(hidden, residual, layer.input_norm, eps)
            hidden = self._attention(layer, hidden, cos, sin, caches[index], meta)
            if on_layer is not None:
                on_layer(index + 1)
            hidden, residual = ops.add_rms_norm(hidden, residual, layer.mlp_norm, eps)
            hidden = layer.down(ops.silu_mul(layer.gate_up(hidden)))
        return hidden + residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, vocab] float32."""
        return self._head(self._ops.rms_norm(hidden, self._final_norm, self.config.rms_norm_eps)).float()

    def _attention(
        self,
        layer: LlamaLayer,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: tuple[Tensor, ...],
        meta: AttentionMetadata,
    ) -> Tensor:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(hidden).view(hidden.shape[0], heads + 2 * kv_heads, self.config.head_dim)
        query, key = self._ops.rotary(qkv[:, :heads], qkv[:, heads : heads + kv_heads], cos, sin)
        pair = (cache[0], cache[1])
        self._ops.kv_write(key, qkv[:, heads + kv_heads :], pair, meta)
        return layer.output(self._ops.attention(query, pair, meta, self._scale))


class _Loader:
    """Takes weights by HuggingFace name and makes them ready for the device."""

    def __init__(self, config: ModelConfig, weights: TrackedWeights, device: Device, dtype: torch.dtype) -> None:
        self._config = config
        self._weights = weights
        self._device = device
        self._dtype = dtype

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.take(name, shape).to(self._device.torch_device, self._dtype)

    def layer(self, index: int) -> LlamaLayer:
        c = self._config
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        query, key_value = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self._weights.skip(attention + "rotary_emb.inv_freq")
        return LlamaLayer(
            input_norm=self.tensor(prefix + "input_layernorm.weight", c.hidden_size),
            qkv=self._linear(
                {attention + "q_proj": query, attention + "k_proj": key_value, attention + "v_proj": key_value},
                c.hidden_size,
                c.attention_bias,
            ),
            output=self._linear({attention + "o_proj": c.hidden_size}, query, c.attention_bias),
            mlp_norm=self.tensor(prefix + "post_attention_layernorm.weight", c.hidden_size),
            gate_up=self._linear(
                {mlp + "gate_proj": c.intermediate_size, mlp + "up_proj": c.intermediate_size},
                c.hidden_size,
                c.mlp_bias,
            ),
            down=self._linear({mlp + "down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
        )

    def head(self, embedding: Tensor) -> Linear:
        """The embedding again when tied, whether or not the checkpoint carries a copy."""
        if self._config.tie_word_embeddings:
            self._weights.skip("lm_head.weight")
            return self._device.ops.pack_linear(embedding)
        return self._linear({"lm_head": self._config.vocab_size}, self._config.hidden_size, False)

    def frequencies(self) -> Tensor:
        size = self._config.head_dim
        factors = self._weights.take(ROPE_FACTORS, (size // 2,)) if self._weights.has(ROPE_FACTORS) else None
        return inverse_frequencies(self._config.rope, size, factors)

    def _linear(self, outputs: dict[str, int], inputs: int, has_bias: bool) -> Linear:
        """One packed linear out of projections that share their input, laid one below the other."""
        weights = [self.tensor(f"{name}.weight", rows, inputs) for name, rows in outputs.items()]
        biases = [self.tensor(f"{name}.bias", rows) for name, rows in outputs.items()] if has_bias else []
        return self._device.ops.pack_linear(_stacked(weights), _stacked(biases) if biases else None)


def _stacked(parts: list[Tensor]) -> Tensor:
    """Along the first axis, without a copy where there is one part only."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
