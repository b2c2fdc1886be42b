"""The accelerators' paged layout: addresses and alignment, and that reading is the inverse of writing."""

import pytest
import torch

from kvferry.common.base.errors import ConfigError
from kvferry.common.device.accelerator import CacheRules
from kvferry.common.device.base import KvTensorSpec
from kvferry.common.device.paged import allocate_paged, read_paged_blocks, write_paged_tokens

CPU = torch.device("cpu")
RULES = CacheRules(alignment=512, block_size_multiple=128, block_size_max=512)
SPECS = (KvTensorSpec("key", (2, 8), torch.bfloat16), KvTensorSpec("latent", (5,), torch.float32, shard_axis=None))


def test_a_layer_is_one_allocation_of_aligned_zeroed_tensors():
    key, latent = allocate_paged(SPECS, 3, 16, CPU, alignment=4096)
    assert key.shape == (3, 16, 2, 8)
    assert latent.shape == (3, 16, 5)
    assert key.dtype == torch.bfloat16
    assert latent.dtype == torch.float32
    assert key.data_ptr() % 4096 == 0
    assert latent.data_ptr() % 4096 == 0
    assert key.untyped_storage().data_ptr() == latent.untyped_storage().data_ptr()
    assert key.is_contiguous()
    assert latent.is_contiguous()
    assert not key.any()
    assert not latent.any()


def test_the_tensors_of_a_layer_do_not_overlap():
    key, latent = allocate_paged(SPECS, 3, 16, CPU, alignment=512)
    key.fill_(1)
    latent.fill_(2)
    assert (key == 1).all()


@pytest.mark.parametrize("index", range(2))
def test_reading_blocks_returns_what_was_written(index):
    cache = allocate_paged(SPECS, 4, 16, CPU)[index]
    tokens = torch.randn(32, *SPECS[index].shape_per_token).to(cache.dtype)
    slots = torch.cat((torch.arange(48, 64), torch.arange(16, 32)))
    write_paged_tokens(cache, slots, tokens)
    blocks = read_paged_blocks(cache, torch.tensor([3, 1]))
    assert blocks.is_contiguous()
    assert torch.equal(blocks.flatten(0, 1), tokens)
    assert not read_paged_blocks(cache, torch.tensor([0, 2])).any()


@pytest.mark.parametrize(("wanted", "given"), [(1, 128), (16, 128), (128, 128), (129, 256), (512, 512)])
def test_block_sizes_are_rounded_up_to_what_the_kernels_support(wanted, given):
    assert RULES.block_size(wanted, "npu") == given


def test_a_block_size_beyond_the_kernels_limit_is_refused():
    with pytest.raises(ConfigError, match=r"node.block_size 513 .* npu, .*multiples of 128 up to 512"):
        RULES.block_size(513, "npu")
