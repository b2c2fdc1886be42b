"""Weights in the layouts that the native matmul reads: panels of 16 columns (src/tile.h, src/tile_quantized.h)."""

from ctypes import CDLL
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional

from kvferry.common.device.quantize import INT4_GROUP, ROW_GROUP, Quantized

PANEL = 16
INT8_UNIT = 32
"""Panels of int8 are padded to a multiple of so many inputs."""


class Kind(IntEnum):
    """`Kind` of src/matmul.h; the values must match."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    INT8_DYNAMIC = 4


@dataclass(frozen=True, slots=True)
class Panels:
    """Packed weights of [outputs, inputs]."""

    outputs: int
    inputs: int
    kind: Kind
    memory: Tensor
    scales: Tensor | None = None
    """[outputs] float32: factor of each column's sums."""


def packed_bytes(library: CDLL, outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """Size of a packed weight, float32 or bfloat16."""
    return int(library.kvf_packed_bytes(outputs, inputs, int(dtype == torch.bfloat16)))


def pack(library: CDLL, weight: Tensor, memory: Tensor | None = None) -> Panels:
    """Pack weight [out, in], float32 or bfloat16, into `memory` of packed_bytes, or into new memory."""
    outputs, inputs = weight.shape
    if memory is None:
        memory = torch.empty(packed_bytes(library, outputs, inputs, weight.dtype), dtype=torch.uint8)
    panels, source = view_packed(library, memory, outputs, inputs, weight.dtype), weight.contiguous()
    is_bf16 = int(panels.kind is Kind.BFLOAT16)
    library.kvf_pack(source.data_ptr(), outputs, inputs, is_bf16, memory.data_ptr(), torch.get_num_threads())
    return panels


def view_packed(library: CDLL, memory: Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> Panels:
    """Interpret `memory` that an earlier `pack` filled; keeps it. Raises ValueError if the size does not match."""
    needed = packed_bytes(library, outputs, inputs, dtype)
    if memory.dtype != torch.uint8 or memory.numel() != needed:
        raise ValueError(
            f"a packed {dtype} weight [{outputs}, {inputs}] has {needed} uint8 values, found {memory.numel()} "
            f"{memory.dtype}"
        )
    return Panels(outputs, inputs, Kind.BFLOAT16 if dtype == torch.bfloat16 else Kind.FLOAT32, memory)


def pack_quantized(library: CDLL, weight: Quantized) -> Panels:
    outputs, inputs = weight.values.shape
    if weight.lows is not None:
        return Panels(outputs, inputs, Kind.INT4, _groups(weight.values, weight.scales, weight.lows))
    if weight.rounds_rows:
        memory, kind = _interleaved(weight.values, library.kvf_int8_dynamic_interleave(), ROW_GROUP), Kind.INT8_DYNAMIC
    else:
        memory, kind = _interleaved(weight.values, 1, INT8_UNIT), Kind.INT8
    return Panels(outputs, inputs, kind, memory, weight.scales.flatten())


def _interleaved(values: Tensor, together: int, unit: int) -> Tensor:
    """[out, in] int8 -> [panels, in / together, 16, together], zero-padded to whole panels and units of inputs."""
    columns, rows = -values.shape[0] % PANEL, -values.shape[1] % unit
    padded = functional.pad(values, (0, rows, 0, columns))
    by_panel = padded.view(padded.shape[0] // PANEL, PANEL, padded.shape[1] // together, together)
    return by_panel.transpose(1, 2).contiguous()


def _groups(values: Tensor, scales: Tensor, lows: Tensor) -> Tensor:
    """[out, in] of 0 to 15 -> [panels, groups, bytes]: 16 scales and 16 lows in float16, then eight values per lane."""
    columns = -values.shape[0] % PANEL
    values, scales, lows = (functional.pad(part, (0, 0, 0, columns)) for part in (values, scales, lows))
    panels, groups = values.shape[0] // PANEL, values.shape[1] // INT4_GROUP
    pairs = values.view(panels, PANEL, groups, INT4_GROUP // 8, 4, 2)
    lanes = (pairs[..., 0] | pairs[..., 1] << 4).permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)
    ends = [part.view(panels, PANEL, groups).transpose(1, 2).contiguous().view(torch.uint8) for part in (scales, lows)]
    return torch.cat([*ends, lanes], dim=-1).contiguous()
