"""Whole decoder layers in one native call, for layers whose parts are all packed for the native ops.

No Python runs between two ops, and the GIL is taken once per step instead of once per op.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL, Array, byref
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.common.device.native.library import LayerStruct, NativeBatch, ShapeStruct, StepStruct
from kvferry.common.device.native.linear import HEAD_MULTIPLE, NativeLinear
from kvferry.common.device.ops import AttentionMetadata, GatedLayer, LayerShape, Linear


@dataclass(frozen=True, slots=True)
class _BoundCaches:
    """The layers' structs with the addresses of these caches. Immutable: a kernel may be reading the structs."""

    caches: Sequence[tuple[Tensor, ...]]
    structs: Array[LayerStruct]


class NativeLayers:
    """Implements `kvferry.common.device.ops.FusedLayers`. Keeps the layers' parts alive."""

    def __init__(
        self,
        library: CDLL,
        layers: Sequence[GatedLayer],
        shape: LayerShape,
        batch_for: Callable[[AttentionMetadata], NativeBatch],
    ) -> None:
        """`layers` must satisfy `can_fuse`."""
        hidden, intermediate = _native(layers[0].qkv).struct.in_, _native(layers[0].down).struct.in_
        self._run = library.kvf_layers
        self._batch_for = batch_for
        self._layers = tuple(layers)
        self._is_bf16 = int(_native(layers[0].qkv).dtype == torch.bfloat16)
        self._shape = ShapeStruct(
            hidden, shape.heads, shape.kv_heads, shape.head_dim, intermediate, shape.eps, shape.scale
        )
        self._structs = (LayerStruct * len(layers))(*(_struct(layer) for layer in layers))
        """Without the addresses of caches."""
        self._bound: _BoundCaches | None = None

    def __call__(
        self,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        meta: AttentionMetadata,
        caches: Sequence[tuple[Tensor, ...]],
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        batch, structs = self._batch_for(meta), self._bound_to(caches).structs
        delta = torch.empty_like(residual)
        step = StepStruct(
            batch.struct, residual.shape[0], batch.slots.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            residual.data_ptr(), delta.data_ptr(), 0,
        )  # fmt: skip
        threads, count = torch.get_num_threads(), len(self._layers)
        if on_layer is None:
            self._run(self._is_bf16, byref(self._shape), structs, count, byref(step), threads)
            return delta
        for index in range(count):
            one = byref(structs[index])
            self._run(self._is_bf16, byref(self._shape), one, 1, byref(step), threads)
            step.has_delta = 1
            on_layer(index + 1)
        return delta

    def _bound_to(self, caches: Sequence[tuple[Tensor, ...]]) -> _BoundCaches:
        # The caches are usually the same from step to step; their addresses are filled in only when they change.
        # Nodes in one process may share a model, so another thread's step may replace self._bound at any time.
        bound = self._bound
        if bound is None or bound.caches is not caches:
            structs = type(self._structs).from_buffer_copy(self._structs)
            for struct, (keys, values) in zip(structs, caches, strict=True):
                if not (keys.is_contiguous() and values.is_contiguous() and keys.shape == values.shape):
                    raise ValueError("a layer's keys and values must be contiguous and of one shape")
                struct.keys, struct.values = keys.data_ptr(), values.data_ptr()
            self._bound = bound = _BoundCaches(caches, structs)
        return bound


def can_fuse(layers: Sequence[GatedLayer], shape: LayerShape) -> bool:
    """Whether every part is packed for the native ops, all in one dtype."""
    if not layers or shape.head_dim % HEAD_MULTIPLE:
        return False
    linears = [part for layer in layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    norms = [norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm, *(layer.head_norms or ()))]
    first = linears[0]
    return (
        isinstance(first, NativeLinear)
        and all(isinstance(part, NativeLinear) and part.dtype == first.dtype for part in linears)
        and all(norm.dtype == first.dtype and norm.is_contiguous() for norm in norms)
    )


def _native(linear: Linear) -> NativeLinear:
    assert isinstance(linear, NativeLinear)
    return linear


def _struct(layer: GatedLayer) -> LayerStruct:
    query_norm, key_norm = layer.head_norms or (None, None)
    return LayerStruct(
        layer.input_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        None if query_norm is None else query_norm.data_ptr(),
        None if key_norm is None else key_norm.data_ptr(),
        _native(layer.qkv).struct,
        _native(layer.output).struct,
        _native(layer.gate_up).struct,
        _native(layer.down).struct,
        window=layer.window,
    )
