"""Caches, copies, streams and threads on `npu:0` and `npu:1`, through the real torch_npu onto host memory.

No kernels here, and no asynchrony but one: a process with HOST_ACL_LATE_D2H=1 does copies to the host at the last
moment, so that reading before the event is seen as the mistake it is.
"""

import ctypes
import threading

import pytest
import torch

from common.device.base import KvTensorSpec
from tests.npu.test_detection import in_a_process

SPECS = (KvTensorSpec("key", (2, 128), torch.bfloat16), KvTensorSpec("value", (2, 128), torch.bfloat16))
BLOCKS, BLOCK = 6, 128


@pytest.fixture(scope="module")
def device(torch_npu):
    from common.device.npu import open_npu

    return open_npu(1)


@pytest.fixture
def caches(device):
    return device.allocate_layer_cache(SPECS, BLOCKS, BLOCK)


def copies(kind):
    return ctypes.CDLL("libascendcl.so").host_acl_copies(kind)


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


def test_blocks_go_to_the_host_in_one_copy(device, caches):
    tokens = torch.randn(BLOCKS * BLOCK, 2, 128).bfloat16()
    device.write_tokens(caches[0], torch.arange(BLOCKS * BLOCK), tokens)
    out = device.pinned_empty(3 * BLOCK * 2 * 128 * 2)
    before = copies(2)
    wanted = tokens.view(BLOCKS, BLOCK, 2, 128)[[5, 0, 3]]
    device.read_blocks_to_host(caches[0], torch.tensor([5, 0, 3]), out).synchronize()
    # The gather's stand-in reads its operands over the host as well: two copies of its own.
    assert copies(2) - before == 3
    assert torch.equal(out.view(torch.bfloat16).view(3, BLOCK, 2, 128), wanted)


LATE = """
import torch
from tests.npu.reference_kernels import bind_kernels
bind_kernels()
from common.device.base import KvTensorSpec
from common.device.npu import open_npu
device = open_npu(0)
(cache,) = device.allocate_layer_cache((KvTensorSpec("key", (1, 8), torch.float32),), 2, 128)
cache.copy_(torch.ones(cache.shape))
out = device.pinned_empty(128 * 8 * 4)
out.zero_()
event = device.read_blocks_to_host(cache, torch.tensor([1]), out)
early = bool(out.any())
event.synchronize()
result = [early, bool((out.view(torch.float32) == 1).all())]
"""


def test_the_copy_is_there_after_the_event_and_not_promised_before():
    assert in_a_process(LATE, HOST_ACL_LATE_D2H="1") == [False, True]


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
