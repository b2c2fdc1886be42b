"""Loads the kernels' library through ctypes and declares its functions and structs. Builds nothing.

Pointers are plain addresses: the caller must keep the tensors behind them alive and as contiguous as each function
requires, and must check shapes. A call releases the GIL while it computes.
"""

import ctypes
from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from kvferry.common.device.ops import AttentionMetadata


class WeightStruct(Structure):
    """A packed linear; `Weight` of src/matmul.h."""

    _fields_ = (
        ("out", c_int64),
        ("in_", c_int64),
        ("kind", c_int32),
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
    )


class BatchStruct(Structure):
    """A ragged batch; `Batch` of src/attention.h."""

    _fields_ = (
        ("sequences", c_int64),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("block_size", c_int64),
    )


class NativeBatch:
    """A step's batch as the kernels read it; keeps the arrays behind `struct` alive."""

    def __init__(self, meta: AttentionMetadata) -> None:
        self.meta = meta
        self.tables = meta.block_tables.to(torch.int32).contiguous()
        self.slots = meta.slot_mapping.to(torch.int64).contiguous()
        self._starts = torch.tensor(meta.query_start_loc, dtype=torch.int64)
        self._lengths = torch.tensor(meta.seq_lens, dtype=torch.int64)
        self.struct = BatchStruct(
            len(meta.seq_lens),
            self._starts.data_ptr(),
            self._lengths.data_ptr(),
            self.tables.data_ptr(),
            self.tables.shape[1],
            meta.block_size,
        )
        self.reference = byref(self.struct)


class ShapeStruct(Structure):
    """The sizes that all layers have in common; `Shape` of src/layers.h."""

    _fields_ = (
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("size", c_int64),
        ("intermediate", c_int64),
        ("eps", c_float),
        ("scale", c_float),
    )


class LayerStruct(Structure):
    """One layer; `Layer` of src/layers.h."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", WeightStruct),
        ("output", WeightStruct),
        ("gate_up", WeightStruct),
        ("down", WeightStruct),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    )


class StepStruct(Structure):
    """One step's tensors; `Step` of src/layers.h."""

    _fields_ = (
        ("batch", BatchStruct),
        ("tokens", c_int64),
        ("slots", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("residual", c_void_p),
        ("delta", c_void_p),
        ("has_delta", c_int64),
    )


_I, _L, _P, _F = c_int32, c_int64, c_void_p, c_float
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "kvf_pack": (_P, _L, _L, _I, _P, _I),
    "kvf_linear": (_I, POINTER(WeightStruct), _P, _L, _L, _P, _I),
    "kvf_rms_norm": (_I, _P, _P, _P, _F, _L, _L, _P, _I),
    "kvf_silu_mul": (_I, _P, _L, _L, _P, _I),
    "kvf_rotate": (_I, _P, _L, _L, _P, _P, _P, _L, _L, _I),
    "kvf_write_cache": (_I, _P, _L, _L, _P, _P, _L, _L, _L, _I),
    "kvf_attention": (_I, POINTER(BatchStruct), _P, _L, _P, _P, _L, _L, _L, _F, _L, _P, _I),
    "kvf_layers": (_I, POINTER(ShapeStruct), POINTER(LayerStruct), _L, POINTER(StepStruct), _I),
}


def load_library(path: Path) -> CDLL:
    """Open the library and declare its functions. Raises OSError if it cannot be loaded, AttributeError if a function
    is missing."""
    library = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    library.kvf_packed_bytes.argtypes = (_L, _L, _I)
    library.kvf_packed_bytes.restype = _L
    library.kvf_int8_dynamic_interleave.argtypes = ()
    library.kvf_int8_dynamic_interleave.restype = _I
    return library
