"""`NpuOps` run to numbers: the real torch_npu calls, reference kernels behind them, CPU tensors.

Shows that the arguments mean what they should (cumulative ends, lengths, tables, mask, axes). Says nothing about the
numbers of Ascend's own kernels.
"""

from typing import cast

import pytest
import torch

from kvferry.common.device.npu_ops import NpuFeatures, NpuOps, TorchNpuOps, causal_mask
from kvferry.common.device.torch_ops import TorchOps
from tests.npu.reference_kernels import calls, dense_attention
from tests.support.ragged_batch import make_ragged_batch

SCALE = 0.09
BATCHES = [((300, 20), (5, 2)), ((1,), (1,)), ((129, 128, 40), (1, 1, 1)), ((260, 7, 140), (260, 1, 12))]
PLAIN = TorchOps()


@pytest.fixture(params=["reshape_and_cache", "scatter_pa", "torch"])
def ops(torch_npu, request):
    calls.clear()
    features = NpuFeatures(True, True, True, cache_write=request.param, attention=True)
    return NpuOps(torch_npu, features, causal_mask(torch.device("cpu")))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(1)


def dense(batch, new):
    parts = zip(batch.query.split(list(new)), batch.keys, batch.values, strict=True)
    return torch.cat([dense_attention(query, keys, values, SCALE) for query, keys, values in parts]).flatten(1)


@pytest.mark.parametrize(("lengths", "new"), BATCHES)
def test_writing_and_attending_equal_dense_attention(ops, lengths, new):
    batch = make_ragged_batch(lengths, new, dtype=torch.bfloat16)
    ops.kv_write(*batch.all_keys(), batch.cache, batch.write_meta)
    out = ops.attention(batch.query, batch.cache, batch.meta, SCALE)
    assert calls["npu_fused_infer_attention_score"] == 1
    assert torch.equal(out, dense(batch, new))


def test_the_kernel_wanted_writes_the_cache(ops):
    batch = make_ragged_batch((20,), (20,), dtype=torch.bfloat16)
    ops.kv_write(*batch.all_keys(), batch.cache, batch.write_meta)
    written = {name: calls[name] for name in ("_npu_reshape_and_cache", "npu_scatter_pa_kv_cache")}
    wanted = ops._features.cache_write
    assert written == {
        "_npu_reshape_and_cache": int(wanted == "reshape_and_cache"),
        "npu_scatter_pa_kv_cache": int(wanted == "scatter_pa"),
    }


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 128), (torch.bfloat16, 64)])
def test_what_the_attention_kernel_does_not_take_goes_to_plain_torch(ops, dtype, size):
    batch = make_ragged_batch((300, 20), (5, 1), dtype=dtype, size=size)
    ops.kv_write(*batch.all_keys(), batch.cache, batch.write_meta)
    out = ops.attention(batch.query, batch.cache, batch.meta, SCALE)
    assert calls["npu_fused_infer_attention_score"] == 0
    torch.testing.assert_close(out, dense(batch, (5, 1)), rtol=2e-2, atol=2e-2)


def test_slices_of_a_merged_projection_are_taken(ops):
    """Query, key and value come as slices of one matmul's output: not contiguous, which the kernels refuse."""
    batch = make_ragged_batch((130,), (130,), dtype=torch.bfloat16)
    merged = torch.cat((batch.query.flatten(1), *(t.flatten(1) for t in batch.all_keys())), -1)
    query, key, value = (part.unflatten(1, (-1, 128)) for part in merged.split([8 * 128, 2 * 128, 2 * 128], -1))
    assert not key.is_contiguous()
    ops.kv_write(key, value, batch.cache, batch.write_meta)
    assert torch.equal(ops.attention(query, batch.cache, batch.meta, SCALE), dense(batch, (130,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_small_ops_equal_plain_torch(ops, dtype):
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, 64), (5, 64), (64,)))
    query, key = torch.randn(5, 8, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    angles = torch.rand(5, 8).repeat(1, 2)

    def results(table):
        return (
            table.rms_norm(x, weight, 1e-5), *table.add_rms_norm(x, residual, weight, 1e-5), table.silu_mul(x),
            *table.rotary(query, key, angles.cos(), angles.sin()),
        )  # fmt: skip

    for got, wanted in zip(results(ops), results(PLAIN), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    assert all(calls[name] for name in ("npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "npu_rotary_mul"))


def test_without_the_kernels_everything_is_plain_torch():
    none = NpuFeatures(False, False, False, cache_write="torch", attention=False)
    ops = NpuOps(cast(TorchNpuOps, None), none, causal_mask(torch.device("cpu")))
    batch = make_ragged_batch((300, 20), (5, 1), dtype=torch.bfloat16)
    ops.kv_write(*batch.all_keys(), batch.cache, batch.write_meta)
    torch.testing.assert_close(
        ops.attention(batch.query, batch.cache, batch.meta, SCALE), dense(batch, (5, 1)), rtol=2e-2, atol=2e-2
    )
    assert ops.silu_mul(torch.ones(2, 4)).shape == (2, 2)
