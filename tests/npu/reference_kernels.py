"""What Ascend's kernels compute, in plain torch, bound to the real op schemas of torch_npu. Test code only.

Each kernel first checks the documented limits that the schema does not express, so a call that a real kernel would
refuse is refused here too. Tensors on `npu:N` lie in host memory here; for the few aten ops that the cache code uses
there, the result is computed on a CPU copy.
"""

import math
import warnings
from collections import Counter
from functools import cache

import torch
from torch import Tensor

calls: Counter[str] = Counter()
"""How often each reference kernel ran."""

_library: list[torch.library.Library] = []


@cache
def bind_kernels():
    """Import torch_npu and bind everything once; returns the module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_npu

        npu, atb, aten = (torch.library.Library(name, "IMPL") for name in ("npu", "atb", "aten"))
        _library.extend((npu, atb, aten))
        for kernel in (
            npu_rms_norm, npu_add_rms_norm, npu_rotary_mul, npu_swiglu, npu_scatter_pa_kv_cache,
            npu_fused_infer_attention_score,
        ):  # fmt: skip
            npu.impl(kernel.__name__, kernel, "CPU")
        npu.impl("npu_fused_infer_attention_score.out", _fused_infer_attention_score_out, "CPU")
        npu.impl("_npu_fused_infer_attention_score_get_max_workspace", lambda *_, **__: torch.empty(0), "CPU")
        npu.impl("_npu_fused_infer_attention_score_infer_output", _attention_outputs, "CPU")
        atb.impl("_npu_reshape_and_cache", _npu_reshape_and_cache, "CPU")
        aten.impl("index_select", _index_select_on_npu, "PrivateUse1")
        aten.impl("index_put_", _index_put_on_npu, "PrivateUse1")
        aten.impl("zero_", lambda tensor: tensor.copy_(torch.zeros(tensor.shape, dtype=tensor.dtype)), "PrivateUse1")
    return torch_npu


def npu_rms_norm(x, gamma, epsilon=1e-6):
    calls["npu_rms_norm"] += 1
    assert x.shape[-1:] == gamma.shape
    deviation = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * deviation * gamma.float()).to(x.dtype), deviation


def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    calls["npu_add_rms_norm"] += 1
    assert x1.dtype == x2.dtype == gamma.dtype
    total = x1 + x2
    return *npu_rms_norm(total, gamma, epsilon), total


def npu_rotary_mul(x, r1, r2, rotary_mode="half", rotate=None):
    calls["npu_rotary_mul"] += 1
    assert rotary_mode == "half"
    assert rotate is None
    batch, length, heads, size = x.shape
    assert batch < 1000
    assert heads < 1000
    assert size < 896
    assert size % 2 == 0
    assert r1.shape == r2.shape == (1, length, 1, size)
    assert x.dtype == r1.dtype == r2.dtype
    first, second = x.chunk(2, -1)
    return x * r1 + torch.cat((-second, first), -1) * r2


def npu_swiglu(x, dim=-1):
    calls["npu_swiglu"] += 1
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def npu_scatter_pa_kv_cache(
    key, value, key_cache, value_cache, slot_mapping, *, compress_lens=None, compress_seq_offsets=None, seq_lens=None,
    cache_mode="PA_NZ",
):  # fmt: skip
    calls["npu_scatter_pa_kv_cache"] += 1
    assert cache_mode == "Norm", "the plain layout is not PA_NZ"
    assert compress_lens is compress_seq_offsets is seq_lens is None
    _write_cache(key, value, key_cache, value_cache, slot_mapping)


def _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    calls["_npu_reshape_and_cache"] += 1
    assert slot_indices.dtype == torch.int32
    _write_cache(key, value, key_cache, value_cache, slot_indices)


def _write_cache(key, value, key_cache, value_cache, slots):
    assert all(tensor.is_contiguous() for tensor in (key, value, key_cache, value_cache, slots))
    assert len(set(slots.tolist())) == len(slots)
    for tokens, tensor in ((key, key_cache), (value, value_cache)):
        assert tokens.dtype == tensor.dtype
        assert tokens.shape[1:] == tensor.shape[2:]
        tensor.view(-1, *tensor.shape[2:])[slots.long()] = tokens


def npu_fused_infer_attention_score(
    query, key, value, *, atten_mask=None, actual_seq_lengths=None, actual_seq_lengths_kv=None, block_table=None,
    num_heads=1, scale=1.0, pre_tokens=2147483647, next_tokens=2147483647, input_layout="BSH", num_key_value_heads=0,
    sparse_mode=0, inner_precise=0, block_size=0, softmax_lse_flag=False, **unused,
):  # fmt: skip
    calls["npu_fused_infer_attention_score"] += 1
    assert all(value is None or value in (0, False) for value in unused.values()), "only what is modelled here"
    _check_attention_call(query, key, value, atten_mask, block_table, input_layout, sparse_mode, block_size)
    tokens, heads, size = query.shape
    assert heads == num_heads
    assert num_heads % num_key_value_heads == 0
    assert num_heads // num_key_value_heads <= 64
    assert len(actual_seq_lengths) == len(actual_seq_lengths_kv) == len(block_table) <= 4096
    assert actual_seq_lengths[-1] == tokens, "cumulative, over all of the query"
    out = torch.empty_like(query)
    start = 0
    for end, length, table in zip(actual_seq_lengths, actual_seq_lengths_kv, block_table, strict=True):
        own = table[: math.ceil(length / block_size)].long()
        keys, values = (t[own].view(-1, num_key_value_heads, size)[:length] for t in (key, value))
        out[start:end] = dense_attention(query[start:end], keys, values, scale)
        start = end
    return out, torch.zeros(1)


def _fused_infer_attention_score_out(query, key, value, *, out, workspace=None, **others):
    """What takes its place while a graph is recorded."""
    assert workspace is not None
    out[0].copy_(npu_fused_infer_attention_score(query, key, value, **others)[0])
    return tuple(out)


def _attention_outputs(query, value, **unused):
    return torch.empty_like(query), torch.zeros(1)


def _check_attention_call(query, key, value, mask, block_table, input_layout, sparse_mode, block_size):
    assert input_layout == "TND"
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[2] == 128, "this layout takes no other head size without separate rotary parts"
    assert key.dim() == value.dim() == 3
    assert key.shape[1] == block_size
    assert block_size % 128 == 0
    assert block_size <= 512
    assert sparse_mode == 3
    assert mask.dtype == torch.int8
    assert torch.equal(mask, torch.ones(2048, 2048, dtype=torch.int8).triu(1))
    assert block_table.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in (query, key, value, mask, block_table))


def dense_attention(query, keys, values, scale):
    """query [n, H, D], the last n of the positions in keys and values [L, K, D] -> [n, H, D]; written out plainly."""
    new, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    keys, values = (t.repeat_interleave(heads // kv_heads, 1).double() for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    later = torch.arange(length) > torch.arange(length - new, length)[:, None]
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def _index_select_on_npu(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    return tensor.cpu().index_select(dim, index.cpu()).to(tensor.device)


def _index_put_on_npu(tensor: Tensor, indices, values: Tensor, accumulate=False) -> Tensor:
    on_host = [None if index is None else index.cpu() for index in indices]
    return tensor.copy_(tensor.cpu().index_put_(on_host, values.cpu(), accumulate))
