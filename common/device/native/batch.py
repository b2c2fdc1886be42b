"""A step's batch as the kernels read it: made by the first layer that asks, used by all of them."""

from ctypes import byref

import torch

from kvferry.common.device.base import AttentionMetadata
from kvferry.common.device.native.library import BatchStruct


class NativeBatch:
    """Keeps the arrays behind `struct` alive."""

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
