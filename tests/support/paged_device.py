"""A device with the accelerators' layout and plain ops, in host memory."""

from collections.abc import Callable

from torch import Tensor

from kvferry.common.device.base import KvTensorSpec
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.graphs import Graphs
from kvferry.common.device.ops import Ops
from kvferry.common.device.paged import allocate_paged, read_paged_blocks, write_paged_tokens
from kvferry.common.device.torch_ops import TorchOps


class PagedDevice:
    """Implements `kvferry.common.device.base.Device`; delegates everything but the layout and the ops to the CPU."""

    def __init__(self) -> None:
        cpu = CpuDevice(1)
        self.name = cpu.name
        self.shares_host_memory = cpu.shares_host_memory
        self.default_steps_in_flight = cpu.default_steps_in_flight
        self.torch_device = cpu.torch_device
        self.ops: Ops = TorchOps()
        self.graphs: Callable[[], Graphs | None] = cpu.graphs
        self.activate_thread = cpu.activate_thread
        self.group = cpu.group
        self.memory_info = cpu.memory_info
        self.supported_block_size = cpu.supported_block_size
        self.pinned_empty = cpu.pinned_empty
        self.synchronize = cpu.synchronize
        self.side_stream = cpu.side_stream

    def allocate_layer_cache(
        self, specs: tuple[KvTensorSpec, ...], num_blocks: int, block_size: int
    ) -> tuple[Tensor, ...]:
        return allocate_paged(specs, num_blocks, block_size, self.torch_device)

    def read_blocks(self, cache: Tensor, block_ids: Tensor) -> Tensor:
        return read_paged_blocks(cache, block_ids)

    def write_tokens(self, cache: Tensor, slots: Tensor, tokens: Tensor) -> None:
        write_paged_tokens(cache, slots, tokens)
