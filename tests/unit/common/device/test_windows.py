"""Sliding windows, latent attention, experts and per-head matmuls of every op table, against loops in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvferry.common.device import cpu_attention
from kvferry.common.device.base import Device, KvTensorSpec
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.ops import AttentionMetadata
from tests.support.cpu_ops import OP_SETS, cpu_with
from tests.support.paged_device import PagedDevice

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 8, 4
LATENT, ROPE = 12, 4
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one_decode": [(1, 13)],
    "ragged_decodes": [(1, 9), (1, 1), (1, 30), (1, 16), (1, 70)],
    "continued_long": [(270, 301)],
    "mixed": [(1, 17), (6, 6), (1, 5), (11, 40), (1, 33)],
}


@pytest.fixture(params=[*OP_SETS, "paged"])
def device(request: pytest.FixtureRequest) -> Device:
    return PagedDevice() if request.param == "paged" else cpu_with(request.param)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paged(
    device: Device, batch: list[tuple[int, int]], specs: tuple[KvTensorSpec, KvTensorSpec], fill: float = math.nan
) -> tuple[tuple[Tensor, Tensor], AttentionMetadata, list[tuple[Tensor, Tensor]]]:
    """A cache with all tokens of the sequences, blocks in random order, `fill` elsewhere; and those tokens."""
    needed = [-(-length // BLOCK) for _, length in batch]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1))
    first, second = device.allocate_layer_cache(specs, len(order), BLOCK)
    tables = torch.zeros(len(batch), max(needed) + 1, dtype=torch.int32)
    contents, new_slots = [], []
    for tensor in (first, second):
        tensor.fill_(fill)
    for row, (new, length) in enumerate(batch):
        tables[row, : needed[row]] = order[sum(needed[:row]) : sum(needed[: row + 1])]
        positions = torch.arange(length)
        slots = tables[row].long()[positions // BLOCK] * BLOCK + positions % BLOCK
        own = tuple(
            randn(length, *spec.shape_per_token, seed=10 * row + index, dtype=spec.dtype)
            for index, spec in enumerate(specs)
        )
        for tensor, tokens in zip((first, second), own, strict=True):
            device.write_tokens(tensor, slots, tokens)
        contents.append((own[0], own[1]))
        new_slots.append(slots[length - new :])
    offsets = (0, *torch.tensor([new for new, _ in batch]).cumsum(0).tolist())
    lengths = tuple(length for _, length in batch)
    return (
        (first, second),
        AttentionMetadata(offsets, lengths, tables, torch.cat(new_slots), BLOCK, torch.tensor(lengths)),
        contents,
    )


def plain(
    batch: list[tuple[int, int]], query: Tensor, contents: list[tuple[Tensor, Tensor]], scale: float, window: int
) -> Tensor:
    """Token by token and head by head; contents are keys [length, K, D] and values [length, K, V]."""
    rows: list[Tensor] = []
    for row, (new, length) in enumerate(batch):
        keys, values = (tensor.double() for tensor in contents[row])
        groups = HEADS // keys.shape[1]
        for position in range(length - new, length):
            token = query[len(rows)].double()
            seen = slice(max(position - window + 1, 0) if window else 0, position + 1)
            rows.append(
                torch.stack([
                    (keys[seen, head // groups] @ token[head] * scale).softmax(0) @ values[seen, head // groups]
                    for head in range(HEADS)
                ])
            )  # fmt: skip
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 10, 1000])
@pytest.mark.parametrize("name", BATCHES)
def test_a_window_hides_older_positions(device: Device, name: str, window: int, dtype: torch.dtype) -> None:
    spec = KvTensorSpec("x", (KV_HEADS, SIZE), dtype)
    cache, meta, contents = paged(device, BATCHES[name], (spec, spec))
    query = randn(meta.query_start_loc[-1], HEADS, SIZE, seed=7, dtype=dtype)
    got = device.ops.attention(query, cache, meta, 0.4, window)
    wanted = plain(BATCHES[name], query, contents, 0.4, window).flatten(1)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), wanted, atol=TOLERANCE[dtype]), (got.double() - wanted).abs().max()


@pytest.mark.parametrize("name", BATCHES)
def test_a_window_with_plain_matmuls(name: str) -> None:
    """The path of CPUs with bfloat16 instructions."""
    spec = KvTensorSpec("x", (KV_HEADS, SIZE), torch.bfloat16)
    cache, meta, contents = paged(CpuDevice(1), BATCHES[name], (spec, spec))
    query = randn(meta.query_start_loc[-1], HEADS, SIZE, seed=7, dtype=torch.bfloat16)
    layout = cpu_attention.lay_out(meta, KV_HEADS, cpu_attention.BMM_ROWS, window=9)
    got = cpu_attention.attend(layout, query, cache, 0.4, torch.bfloat16).double()
    assert torch.allclose(got, plain(BATCHES[name], query, contents, 0.4, 9).flatten(1), atol=3e-2)


def test_blocks_before_the_window_are_not_read(device: Device) -> None:
    """They may be freed: their contents must not affect the result."""
    batch, window = [(1, 30), (5, 41), (1, 22)], 6
    spec = KvTensorSpec("x", (KV_HEADS, SIZE), torch.float32)
    cache, meta, _ = paged(device, batch, (spec, spec))
    query = randn(meta.query_start_loc[-1], HEADS, SIZE, seed=7)
    wanted = device.ops.attention(query, cache, meta, 0.4, window)
    shorter = meta.block_tables.clone()
    for row, (new, length) in enumerate(batch):
        shorter[row, : (length - new + 1 - window) // BLOCK] = shorter[row - 1, 0]
    moved = AttentionMetadata(meta.query_start_loc, meta.seq_lens, shorter, meta.slot_mapping, BLOCK, meta.lengths)
    assert not torch.equal(shorter, meta.block_tables)
    assert torch.equal(device.ops.attention(query, cache, moved, 0.4, window), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BATCHES)
def test_latent_attention(device: Device, name: str, dtype: torch.dtype) -> None:
    specs = KvTensorSpec("latent", (LATENT,), dtype, None), KvTensorSpec("rope_key", (ROPE,), dtype, None)
    cache, meta, contents = paged(device, BATCHES[name], specs)
    query = randn(meta.query_start_loc[-1], HEADS, LATENT + ROPE, seed=7, dtype=dtype)
    got = device.ops.latent_attention(query, cache, meta, 0.3)
    as_heads = [(torch.cat(both, -1)[:, None], both[0][:, None]) for both in contents]
    wanted = plain(BATCHES[name], query, as_heads, 0.3, 0)
    assert got.shape == wanted.shape
    assert torch.allclose(got.double(), wanted, atol=TOLERANCE[dtype]), (got.double() - wanted).abs().max()


def test_latent_write_touches_only_its_slots(device: Device) -> None:
    specs = (
        KvTensorSpec("latent", (LATENT,), torch.float32, None),
        KvTensorSpec("rope_key", (ROPE,), torch.float32, None),
    )
    cache, meta, _ = paged(device, [(3, 9), (1, 6)], specs, fill=0.0)
    before = [tensor.clone() for tensor in cache]
    device.ops.latent_write(torch.full((4, LATENT), 7.0), torch.full((4, ROPE), 8.0), cache, meta)
    for tensor, old, number in zip(cache, before, (7.0, 8.0), strict=True):
        flat = tensor.view(-1, tensor.shape[-1])
        changed = (flat != old.view(flat.shape)).any(-1).nonzero().flatten()
        assert torch.equal(changed, meta.slot_mapping.sort().values)
        assert (flat[changed] == number).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_head(device: Device, dtype: torch.dtype) -> None:
    weight, x = randn(3, 5, 7, dtype=dtype), randn(4, 3, 5, seed=1, dtype=dtype)
    got = device.ops.pack_per_head(weight)(x)
    assert got.dtype == dtype
    wanted = torch.einsum("thi,hio->tho", x.double(), weight.double())
    assert torch.allclose(got.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts(device: Device, dtype: torch.dtype, tokens: int) -> None:
    """No token chooses the last expert."""
    gate_ups = [randn(2 * 6, 10, seed=expert, dtype=dtype) for expert in range(5)]
    downs = [randn(10, 6, seed=30 + expert, dtype=dtype) for expert in range(5)]
    x = randn(tokens, 10, seed=60, dtype=dtype)
    chosen = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(row))[:2] for row in range(tokens)])
    weights = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(5))
    got = device.ops.pack_experts(gate_ups, downs)(x, chosen, weights)
    wanted = torch.zeros(tokens, 10, dtype=torch.float64)
    for row in range(tokens):
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            gate, up = (gate_ups[expert].double() @ x[row].double()).chunk(2)
            wanted[row] += downs[expert].double() @ (functional.silu(gate) * up) * weight.double()
    assert got.dtype == dtype
    assert (got.double() - wanted).abs().max() < TOLERANCE[dtype] * wanted.abs().max()
