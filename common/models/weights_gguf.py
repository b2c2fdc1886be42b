"""Weights of a GGUF file: dequantised, under HuggingFace's names, with q and k rows in HuggingFace's order."""

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.weights import ROPE_FACTORS, Part
from kvferry.common.tokenizer.gguf_header import GgufHeader, GgufTensor

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_FACTORS: ROPE_FACTORS,
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_ROWS_SHUFFLED = ("LlamaForCausalLM",)
"""Architectures whose q and k rows llama.cpp's converter reorders."""


class GgufWeights:
    """Implements WeightSource; a context manager that maps the file while it is open. Tensors are float32."""

    def __init__(self, path: Path, header: GgufHeader, config: TransformerConfig) -> None:
        self._path = path
        self._tensors = {_hf_name(tensor.name): tensor for tensor in header.tensors}
        shuffled = config.architecture in _ROWS_SHUFFLED
        self._heads: Mapping[str, int] = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if shuffled else {}
        self._data: mmap.mmap | None = None

    def __enter__(self) -> Self:
        with self._path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._data is not None:
            self._data.close()
            self._data = None

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape[::-1])

    def get(self, name: str, part: Part | None = None) -> Tensor:
        """The tensor or a part of it as float32, its rows in HuggingFace's order.

        A part along the rows reads only these rows; a part along another axis reads everything, since quantised blocks
        extend along the columns.
        """
        rows = slice(part.start, part.end) if part is not None and part.axis == 0 else slice(None)
        values = self._read(self._tensors[name], rows)
        projection = name.rsplit(".", 2)[-2] if name.count(".") >= 2 else ""
        if projection in self._heads:
            # Rows are reordered within each head, and parts consist of whole heads.
            heads = self._heads[projection] * len(values) // self.shape(name)[0]
            values = _in_half_split_order(values, heads)
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor if part is None or part.axis == 0 else part.cut(tensor)

    def _read(self, tensor: GgufTensor, rows: slice) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        """Dequantise some rows. The result shares no memory with the file."""
        if self._data is None:
            raise ModelLoadError(f"{self._path} is not open")
        try:
            kind = GGMLQuantizationType(tensor.ggml_type)
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
            shape = tensor.shape[::-1]
            row_bytes = shape[-1] // per_block * block_bytes
            if len(shape) == 1:  # one row holds the whole tensor
                shape = (1, *shape)
            first, last, _ = (slice(None) if len(tensor.shape) == 1 else rows).indices(shape[0])
            each = row_bytes * math.prod(shape[1:-1])
            shape, count = (last - first, *shape[1:]), (last - first) * each
            start = tensor.offset + first * each
            raw = self._data[start : start + count]
            if len(raw) != count:
                raise ValueError("the file ends too early")
            blocks = np.frombuffer(raw, np.uint8).reshape(*shape[:-1], row_bytes)
            typed = blocks.view(_PLAIN_TYPES[kind]) if kind in _PLAIN_TYPES else blocks
            values = dequantize(typed, kind).astype(np.float32, copy=True).reshape(shape)
            return values[0][rows] if len(tensor.shape) == 1 else values
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ModelLoadError(f"tensor {tensor.name} of {self._path} cannot be read: {error}") from error


_PLAIN_TYPES = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}


def _in_half_split_order(
    values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", heads: int
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """Undo llama.cpp's row order for interleaved rotary pairs: (2 j, 2 j + 1) -> halves."""
    rows = values.shape[0]
    return values.reshape(heads, rows // heads // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _hf_name(name: str) -> str:
    """HuggingFace's name; an unknown name is returned unchanged and later refused as left over."""
    if name in _WHOLE:
        return _WHOLE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PER_LAYER:
        return f"model.layers.{parts[1]}.{_PER_LAYER[parts[2]]}.{parts[3]}"
    return name
