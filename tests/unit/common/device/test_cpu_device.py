"""The CPU device against plain formulas: packed linears, norms, rotary, paged attention for every shape of batch."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvferry.common.device import cpu_attention, cpu_linear
from kvferry.common.device.base import Device, KvTensorSpec
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.cpu_ops import CpuOps
from kvferry.common.device.ops import AttentionMetadata, Ops
from tests.support.cpu_ops import OP_SETS, ops_named

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 8, 4
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=OP_SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_named(request.param)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_it_implements_the_device_interface() -> None:
    device: Device = CpuDevice(1)
    free, total = device.memory_info()
    assert 0 < free <= total
    assert device.supported_block_size(13) == 13
    assert device.pinned_empty(5).shape == (5,)
    assert device.shares_host_memory
    assert device.default_steps_in_flight == 1
    with pytest.raises(ValueError, match="negative"):
        CpuDevice(-1)


def test_activate_thread_sets_the_calling_threads_compute_threads() -> None:
    before = torch.get_num_threads()
    try:
        CpuDevice(1).activate_thread()
        assert torch.get_num_threads() == 1
        CpuDevice(0).activate_thread()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("with_bias", [False, True])
def test_pack_linear(ops: Ops, dtype: torch.dtype, tokens: int, with_bias: bool) -> None:
    weight, x = randn(33, 20, dtype=dtype), randn(tokens, 20, seed=1, dtype=dtype)
    bias = randn(33, seed=2, dtype=dtype) if with_bias else None
    got = ops.pack_linear(weight, bias)(x)
    wanted = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == dtype
    assert torch.allclose(got.double(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def test_a_dtype_that_cannot_be_packed_is_detected() -> None:
    assert not cpu_linear.packing_works(torch.float64)
    assert cpu_linear.packing_works(torch.bfloat16) or not cpu_linear.native_bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(ops: Ops, dtype: torch.dtype) -> None:
    x, residual, weight = randn(5, 24, dtype=dtype), randn(5, 24, seed=1, dtype=dtype), randn(24, seed=2, dtype=dtype)

    def plain(values: Tensor) -> Tensor:
        wide = values.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert torch.allclose(ops.rms_norm(x, weight, 1e-5).double(), plain(x), atol=TOLERANCE[dtype])
    total = x + residual
    normed, added = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(added, total)
    assert torch.allclose(normed.double(), plain(total), atol=TOLERANCE[dtype])


def test_silu_mul(ops: Ops) -> None:
    x = randn(4, 12)
    assert torch.allclose(ops.silu_mul(x), x[:, :6] * x[:, :6].sigmoid() * x[:, 6:], atol=1e-6)
    assert torch.equal(x, randn(4, 12)), "the input was changed"


@pytest.mark.parametrize("merged", [False, True])
def test_rotary(ops: Ops, merged: bool) -> None:
    """Query and key from one merged projection (rotated together), and as separate tensors."""
    tokens = 5
    qkv = randn(tokens, HEADS + 2 * KV_HEADS, SIZE)
    query, key = qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS]
    if not merged:
        query, key = query.clone(), key.clone()
    angles = randn(tokens, SIZE // 2, seed=3).repeat(1, 2)
    got = ops.rotary(query, key, angles.cos(), angles.sin())
    for rotated, original in zip(got, (query, key), strict=True):
        pairs = torch.complex(original[..., : SIZE // 2], original[..., SIZE // 2 :])
        turned = pairs * torch.polar(torch.ones(tokens, 1, SIZE // 2), angles[:, None, : SIZE // 2])
        assert torch.allclose(rotated, torch.cat((turned.real, turned.imag), -1), atol=1e-5)


BATCHES: dict[str, list[tuple[int, int]]] = {
    "one_token": [(1, 1)],
    "one_decode": [(1, 13)],
    "even_decodes": [(1, 8), (1, 8), (1, 8)],
    "ragged_decodes": [(1, 9), (1, 1), (1, 30), (1, 16), (1, 70)],
    "one_prompt": [(19, 19)],
    "long_prompt": [(300, 300)],
    "continued_long": [(290, 417)],
    "chunk_behind_cache": [(7, 23)],
    "mixed": [(1, 17), (6, 6), (1, 5), (11, 40), (1, 33)],
}


@pytest.mark.parametrize(
    ("compute", "dtype"), [("own", torch.float32), ("own", torch.bfloat16), ("native_bfloat16", torch.bfloat16)]
)
@pytest.mark.parametrize("name", BATCHES)
def test_attention(ops: Ops, name: str, compute: str, dtype: torch.dtype) -> None:
    """Compare with a loop over tokens and heads in float64; blocks are in random order with garbage elsewhere.

    "native_bfloat16" is the path of CPUs with bfloat16 instructions; it is correct, if slow, on others.
    """
    batch = BATCHES[name]
    cache, meta, keys, values = _paged(ops, batch, dtype)
    query = randn(meta.query_start_loc[-1], HEADS, SIZE, seed=7, dtype=dtype)
    if compute == "own":
        got = ops.attention(query, cache, meta, SIZE**-0.5)
    else:
        layout = cpu_attention.lay_out(meta, KV_HEADS, cpu_attention.BMM_ROWS)
        got = cpu_attention.attend(layout, query, cache, SIZE**-0.5, torch.bfloat16)
    assert got.dtype == dtype
    wanted = _plain_attention(batch, query, keys, values)
    assert torch.allclose(got.double(), wanted, atol=TOLERANCE[dtype]), (got.double() - wanted).abs().max()


def test_sequences_of_very_different_lengths_are_not_padded_together() -> None:
    meta = _paged(CpuOps(), [(1, 9), (1, 400), (1, 390), (1, 10), (1, 380)], torch.float32)[1]
    layout = cpu_attention.lay_out(meta, KV_HEADS, cpu_attention.SDPA_ROWS)
    assert [group.row_list for group in layout.groups] == [(1, 2, 4), (0, 3)]


def test_layout_round_trip() -> None:
    device = CpuDevice()
    for shape in ((KV_HEADS, SIZE), (11,), (2, 3, 2)):
        (cache,) = device.allocate_layer_cache((KvTensorSpec("x", shape, torch.float32),), 6, BLOCK)
        tokens = randn(2 * BLOCK, *shape)
        slots = torch.tensor([4 * BLOCK + i for i in range(BLOCK)] + [BLOCK + i for i in range(BLOCK)])
        device.write_tokens(cache, slots, tokens)
        assert torch.equal(device.read_blocks(cache, torch.tensor([4, 1])).flatten(0, 1), tokens)
        assert cache.count_nonzero() == tokens.count_nonzero()


def _paged(
    ops: Ops, batch: list[tuple[int, int]], dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], AttentionMetadata, list[Tensor], list[Tensor]]:
    """A cache with the sequences' keys and values; kv_write writes the newest tokens, the device the older ones."""
    device = CpuDevice()
    spec = KvTensorSpec("x", (KV_HEADS, SIZE), dtype)
    needed = [-(-length // BLOCK) for _, length in batch]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1))
    cache = device.allocate_layer_cache((spec, spec), len(order), BLOCK)
    for tensor in cache:
        tensor.fill_(math.nan)
    tables = torch.zeros(len(batch), max(needed), dtype=torch.int32)
    keys, values, new_slots, new_rows = [], [], [], []
    for row, (new, length) in enumerate(batch):
        tables[row, : needed[row]] = order[sum(needed[:row]) : sum(needed[: row + 1])]
        positions = torch.arange(length)
        slots = tables[row].long()[positions // BLOCK] * BLOCK + positions % BLOCK
        keys.append(randn(length, KV_HEADS, SIZE, seed=10 + row, dtype=dtype))
        values.append(randn(length, KV_HEADS, SIZE, seed=50 + row, dtype=dtype))
        if length > new:
            for tensor, tokens in zip(cache, (keys[row], values[row]), strict=True):
                device.write_tokens(tensor, slots[: length - new], tokens[: length - new])
        new_slots.append(slots[length - new :])
        new_rows.append((keys[row][length - new :], values[row][length - new :]))
    offsets = (0, *torch.tensor([new for new, _ in batch]).cumsum(0).tolist())
    lengths = tuple(length for _, length in batch)
    meta = AttentionMetadata(offsets, lengths, tables, torch.cat(new_slots), BLOCK, torch.tensor(lengths))
    pair = (cache[0], cache[1])
    ops.kv_write(torch.cat([key for key, _ in new_rows]), torch.cat([value for _, value in new_rows]), pair, meta)
    return pair, meta, keys, values


def _plain_attention(batch: list[tuple[int, int]], query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    rows: list[Tensor] = []
    for row, (new, length) in enumerate(batch):
        for position in range(length - new, length):
            token = query[len(rows)].double()
            heads = []
            for head in range(HEADS):
                own = head // (HEADS // KV_HEADS)
                scores = keys[row][: position + 1, own].double() @ token[head] * SIZE**-0.5
                heads.append(scores.softmax(0) @ values[row][: position + 1, own].double())
            rows.append(torch.cat(heads))
    return torch.stack(rows)
