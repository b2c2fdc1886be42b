"""Caches, copies, streams and threads on `npu:0` and `npu:1`, through the real torch_npu onto host memory.

No kernels here, and no asynchrony but one: a process with HOST_ACL_LATE_D2H=1 does copies to the host at the last
moment, so that reading before the event is seen as the mistake it is.
"""

import threading

import pytest
import torch

from kvferry.common.device.base import KvTensorSpec
from tests.npu.test_detection import in_a_process

SPECS = (KvTensorSpec("key", (2, 128), torch.bfloat16), KvTensorSpec("value", (2, 128), torch.bfloat16))
BLOCKS, BLOCK = 6, 128


@pytest.fixture(scope="module")
def device(torch_npu):
    from kvferry.common.device.npu import open_npu

    return open_npu(1)


@pytest.fixture
def caches(device):
    return device.allocate_layer_cache(SPECS, BLOCKS, BLOCK)


def test_it_says_what_it_is(device):
    assert device.name == "npu"
    assert device.torch_device == torch.device("npu", 1)
    free, total = device.memory_info()
    assert 0 < free < total
    assert device.supported_block_size(16) == 128


def test_a_layer_is_one_region_with_aligned_tensors(caches):
    for tensor in caches:
        assert tensor.shape == (BLOCKS, BLOCK, 2, 128)
        assert tensor.device == torch.device("npu", 1)
        assert tensor.data_ptr() % (2 << 20) == 0
        assert not tensor.cpu().any()
    assert len({tensor.untyped_storage().data_ptr() for tensor in caches}) == 1


def test_written_tokens_are_read_back_and_nothing_else_changes(device, caches):
    key, value = caches
    tokens = torch.randn(2 * BLOCK, 2, 128).bfloat16()
    slots = torch.cat((torch.arange(4 * BLOCK, 5 * BLOCK), torch.arange(BLOCK, 2 * BLOCK)))
    device.write_tokens(key, slots, tokens)
    blocks = device.read_blocks(key, torch.tensor([4, 1]))
    assert blocks.device == key.device
    assert torch.equal(blocks.cpu().flatten(0, 1), tokens)
    assert not device.read_blocks(key, torch.tensor([0, 2, 3, 5])).cpu().any()
    assert not value.cpu().any()


def test_pinned_memory_is_pinned(device):
    buffer = device.pinned_empty(1000)
    assert (buffer.dtype, buffer.shape, buffer.device.type) == (torch.uint8, (1000,), "cpu")
    assert buffer.is_pinned()


LATE = """
import torch
from tests.npu.reference_kernels import bind_kernels
bind_kernels()
from kvferry.common.device.npu import open_npu
device = open_npu(0)
cache = torch.empty(64, device=device.torch_device)
cache.copy_(torch.ones(64))
buffers = [device.pinned_empty(256).zero_() for _ in range(2)]
with device.side_stream():
    buffers[0].copy_(cache.view(torch.uint8), non_blocking=True)
    inside = bool(buffers[0].any())
left = bool((buffers[0].view(torch.float32) == 1).all())
buffers[1].copy_(cache.view(torch.uint8), non_blocking=True)
with device.side_stream():
    pass
other = bool(buffers[1].any())
device.synchronize()
result = [inside, left, other, bool(buffers[1].any())]
"""


def test_copies_are_done_when_the_side_stream_or_a_wait_ends_and_not_before():
    """The second copy runs in the thread's own stream: leaving the side stream does not wait for that one."""
    assert in_a_process(LATE, HOST_ACL_LATE_D2H="1") == [False, True, False, True]


SWAP = """
import torch
from tests.npu.reference_kernels import bind_kernels
bind_kernels()
from kvferry.common.device.base import KvTensorSpec
from kvferry.common.device.npu import open_npu
from kvferry.common.engine.host_cache import HostCache
from kvferry.common.engine.kv_cache import KvCache
device = open_npu(0)
cache = KvCache(device, (KvTensorSpec("key", (2, 4), torch.bfloat16),), 2, 4, 128)
host = HostCache(device, cache, 2)
for _, buffer in host._pairs:
    buffer.zero_()
data = bytes(range(1, 65)) * (cache.range_bytes(0, 2, 0, 128) // 64)
cache.write(0, 2, [2], 0, 128, data)
host.copy_out([2], [1])
early = any(bool(buffer.any()) for _, buffer in host._pairs)
device.synchronize()
cache.write(0, 2, [2], 0, 128, bytes(len(data)))
host.copy_in([0], [1])
device.synchronize()
result = [early, bytes(cache.read(0, 2, [0], 0, 128)) == data, any(cache.read(0, 2, [1, 2, 3], 0, 384))]
"""


def test_kv_goes_to_the_host_and_comes_back():
    """The copies wait for nothing but the end of the step; reading and writing for a transport are done on return."""
    assert in_a_process(SWAP, HOST_ACL_LATE_D2H="1") == [False, True, False]


def test_copies_in_the_side_stream_are_not_in_the_threads_own(device, torch_npu):
    own = torch_npu.npu.current_stream()
    with device.side_stream():
        assert torch_npu.npu.current_stream() != own
    assert torch_npu.npu.current_stream() == own


def test_a_thread_must_be_bound(device):
    """The current device is per thread: an unbound thread allocates on npu:0, whatever the others do."""
    seen = []

    def work():
        seen.append(torch.empty(1, device="npu").device.index)
        device.activate_thread()
        seen.append(torch.empty(1, device="npu").device.index)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 1]


def test_synchronize_waits_for_the_threads_stream(device, caches):
    device.activate_thread()
    out = device.pinned_empty(16)
    out.copy_(caches[0].view(-1)[:8].view(torch.uint8), non_blocking=True)
    device.synchronize()
    assert not out.any()


def test_a_kernel_that_is_not_there_fails_at_its_call(device, torch_npu):
    """So that nothing in these tests can pass by doing nothing."""
    with pytest.raises(RuntimeError, match="error code is 500000"):
        torch.ones(4).to(device.torch_device).exp()
