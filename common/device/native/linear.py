"""A linear layer over weights packed for the native matmul. Keeps no second copy of them in any other dtype."""

from ctypes import CDLL, byref

import torch
from torch import Tensor

from common.device.native.library import WeightStruct

DTYPES = (torch.float32, torch.bfloat16)
HEAD_MULTIPLE = 8
"""Head sizes that the kernels take are multiples of this."""


class NativeLinear:
    """x [tokens, in] -> [tokens, out], both of the weight's dtype.

    Bit by bit, a row's result depends on that row alone.
    """

    def __init__(self, library: CDLL, weight: Tensor, bias: Tensor | None) -> None:
        """Packs weight [out, in], float32 or bfloat16; neither it nor bias [out] is kept."""
        out, inputs = weight.shape
        self.dtype = weight.dtype
        is_bf16 = int(weight.dtype == torch.bfloat16)
        self._multiply = library.kvf_linear
        self._panels = torch.empty(library.kvf_packed_bytes(out, inputs, is_bf16), dtype=torch.uint8)
        self._bias = None if bias is None else bias.float().contiguous()
        source = weight.contiguous()
        library.kvf_pack(source.data_ptr(), out, inputs, is_bf16, self._panels.data_ptr(), torch.get_num_threads())
        bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self.struct = WeightStruct(out, inputs, is_bf16, self._panels.data_ptr(), bias_pointer)
        self._reference = byref(self.struct)

    @property
    def num_bytes(self) -> int:
        """Of the packed weight."""
        return self._panels.numel()

    def __call__(self, x: Tensor) -> Tensor:
        """Raises ValueError for another dtype or width than the weight's."""
        if x.dtype != self.dtype or x.shape[-1] != self.struct.in_:
            raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, the weight {self.dtype} takes {self.struct.in_}")
        if x.dim() != 2:
            return self(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.struct.out)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self.struct.out), dtype=self.dtype)
        self._multiply(self._reference, x.data_ptr(), x.stride(0), rows, out.data_ptr(), torch.get_num_threads())
        return out
