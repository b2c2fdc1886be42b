"""A linear layer over weights packed for the native matmul. Keeps no second copy of the weights."""

from ctypes import CDLL, byref

import torch
from torch import Tensor

from kvferry.common.device.native.library import WeightStruct
from kvferry.common.device.native.panels import Panels

DTYPES = (torch.float32, torch.bfloat16)
HEAD_MULTIPLE = 8
"""The kernels take head sizes that are multiples of this."""


class NativeLinear:
    """x [tokens, in] -> [tokens, out], both in the weight's dtype.

    Each bit of a row's result depends on that row alone.
    """

    def __init__(self, library: CDLL, dtype: torch.dtype, panels: Panels, bias: Tensor | None) -> None:
        """`dtype` of input and output: float32 or bfloat16; bias [out] is copied."""
        self.dtype = dtype
        self._is_bf16 = int(dtype == torch.bfloat16)
        self._multiply = library.kvf_linear
        self._panels = panels
        self._bias = None if bias is None else bias.float().contiguous()
        self.struct = WeightStruct(
            panels.outputs, panels.inputs, panels.kind, panels.memory.data_ptr(), _address(self._bias),
            _address(panels.scales),
        )  # fmt: skip
        self._reference = byref(self.struct)

    @property
    def num_bytes(self) -> int:
        """Size of the packed weight."""
        return self._panels.memory.numel() * self._panels.memory.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        """Raises ValueError if x's dtype or width differs from the weight's."""
        if x.dtype != self.dtype or x.shape[-1] != self.struct.in_:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}; the weight takes {self.dtype} with {self.struct.in_} columns"
            )
        if x.dim() != 2:
            return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.struct.out)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self.struct.out), dtype=self.dtype)
        self._multiply(
            self._is_bf16, self._reference, x.data_ptr(), x.stride(0), rows, out.data_ptr(), torch.get_num_threads()
        )
        return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
