"""The native ops' guarantees beyond the op table: the bits of a row depend on that row alone, for every shape."""

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.common.device.base import KvTensorSpec
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.cpu_ops import CpuOps
from kvferry.common.device.native.ops import NativeOps
from kvferry.common.device.ops import AttentionMetadata
from kvferry.common.models.load import load_model
from tests.support.cpu_ops import cpu_with, ops_named
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_families import make_family_checkpoint
from tests.support.tiny_llama import make_checkpoint, random_prompt

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
BLOCK = 5
ROWS = 530
"""More than two blocks of rows, which have at most 256 rows."""


@pytest.fixture
def ops() -> NativeOps:
    native = ops_named("native")
    assert isinstance(native, NativeOps)
    return native


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paged(
    lengths: list[int], kv_heads: int, size: int, dtype: torch.dtype, fill: float = math.nan
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A cache with sequences of these lengths, blocks in random order, `fill` elsewhere; and the block tables."""
    device = CpuDevice(1)
    spec = KvTensorSpec("x", (kv_heads, size), dtype)
    needed = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(1)).int()
    keys, values = device.allocate_layer_cache((spec, spec), len(order), BLOCK)
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for tensor, seed in ((keys, 100), (values, 200)):
        tensor.fill_(fill)
        for row, length in enumerate(lengths):
            tables[row, : needed[row]] = order[sum(needed[:row]) : sum(needed[: row + 1])]
            positions = torch.arange(length)
            slots = tables[row].long()[positions // BLOCK] * BLOCK + positions % BLOCK
            device.write_tokens(tensor, slots, randn(length, kv_heads, size, seed=seed + row, dtype=dtype))
    return (keys, values), tables


def step(counts: list[int], lengths: list[int], tables: Tensor) -> AttentionMetadata:
    offsets = (0, *torch.tensor(counts).cumsum(0).tolist())
    return AttentionMetadata(
        offsets, tuple(lengths), tables, torch.zeros(sum(counts), dtype=torch.int64), BLOCK, torch.tensor(lengths)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 20), (16, 7), (1, 1), (960, 576), (70, 1001)])
def test_a_row_of_a_linear_does_not_depend_on_the_other_rows(
    ops: NativeOps, threads: int, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    linear = ops.pack_linear(randn(outputs, inputs, dtype=dtype), randn(outputs, seed=1, dtype=dtype))
    x = randn(ROWS, inputs, seed=2, dtype=dtype)
    together = linear(x)
    torch.set_num_threads(1)
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(together, alone)
    for count in range(1, 20):
        assert torch.equal(linear(x[3 : 3 + count]), together[3 : 3 + count])


def test_a_linear_takes_strided_and_empty_inputs(ops: NativeOps) -> None:
    linear, x = ops.pack_linear(randn(9, 8)), randn(4, 20)
    assert torch.equal(linear(x[:, 3:11]), linear(x[:, 3:11].contiguous()))
    assert torch.equal(linear(x[:, ::2][:, :8]), linear(x[:, ::2][:, :8].contiguous()))
    assert linear(x[:0, :8]).shape == (0, 9)
    assert linear(x[:, :8].view(2, 2, 8)).shape == (2, 2, 9)
    with pytest.raises(ValueError, match="20"):
        linear(x)
    with pytest.raises(ValueError, match="bfloat16"):
        linear(x[:, :8].bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 37, 200])
@pytest.mark.parametrize(
    ("kv_heads", "group", "size"), [(1, 1, 64), (2, 2, 24), (3, 3, 64), (2, 4, 128), (1, 7, 8), (2, 8, 72), (1, 13, 32)]
)
def test_attention_for_every_shape(
    ops: NativeOps, dtype: torch.dtype, window: int, kv_heads: int, group: int, size: int
) -> None:
    counts, lengths = [1, 1, 40, 3, 1, 200], [1, 129, 40, 260, 300, 211]
    cache, tables = paged(lengths, kv_heads, size, dtype)
    meta = step(counts, lengths, tables)
    query = randn(sum(counts), kv_heads * group, size, seed=3, dtype=dtype)
    got = ops.attention(query, cache, meta, size**-0.5, window)
    wide = (cache[0].double(), cache[1].double())
    wanted = CpuOps().attention(query.double(), (wide[0].float(), wide[1].float()), meta, size**-0.5, window)
    assert torch.allclose(got.double(), wanted.double(), atol=TOLERANCE[dtype])


class BusyLibrary:
    """The kernels; before each call, another thread begins a step with the same ops."""

    def __init__(self, ops: NativeOps) -> None:
        self._ops, self._library = ops, ops.library
        self.other = step([1], [1], torch.zeros(1, 1, dtype=torch.int32))
        self.called: list[str] = []

    def __getattr__(self, kernel: str) -> Any:
        def call(*args: Any) -> None:
            batch = weakref.ref(self._ops._batch)
            self._ops.batch_for(self.other)
            assert batch() is not None, f"{kernel} would read freed memory"
            self.called.append(kernel)
            getattr(self._library, kernel)(*args)

        return call


def test_a_step_keeps_its_arrays_while_another_thread_begins_a_step(ops: NativeOps) -> None:
    cache, tables = paged([4, 9], 2, 16, torch.float32, 0.0)
    meta = step([1, 2], [4, 9], tables)
    busy = BusyLibrary(ops)
    ops.library = busy  # type: ignore[assignment]
    ops.attention(randn(3, 4, 16), cache, meta, 1.0)
    ops.kv_write(randn(3, 2, 16), randn(3, 2, 16), cache, meta)
    assert set(busy.called) == {"kvf_attention", "kvf_write_cache"}


@pytest.mark.parametrize("size", [16, 64, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_does_not_depend_on_the_batch_or_on_chunks(
    ops: NativeOps, threads: int, dtype: torch.dtype, size: int
) -> None:
    lengths = [300, 17, 260, 129]
    cache, tables = paged(lengths, 2, size, dtype)
    query = randn(300, 6, size, seed=3, dtype=dtype)
    whole = ops.attention(query, cache, step([300], [300], tables[:1]), 0.25)
    for cut in (2, 128, 131, 298):
        head = ops.attention(query[:cut], cache, step([cut], [cut], tables[:1]), 0.25)
        tail = ops.attention(query[cut:], cache, step([300 - cut], [300], tables[:1]), 0.25)
        assert torch.equal(torch.cat((head, tail)), whole)
    ones = ops.attention(query[:4], cache, step([1] * 4, lengths, tables), 0.25)
    mixed = ops.attention(query[:103], cache, step([1, 1, 100, 1], lengths, tables), 0.25)
    torch.set_num_threads(1)
    for row in range(4):
        alone = ops.attention(
            query[row : row + 1], cache, step([1], lengths[row : row + 1], tables[row : row + 1]), 0.25
        )
        assert torch.equal(ones[row : row + 1], alone)
    assert torch.equal(mixed[:2], ones[:2])


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_within_its_sequence(ops: NativeOps, dtype: torch.dtype, size: int) -> None:
    lengths = [50, 50, 50]
    cache, tables = paged(lengths, 2, size, dtype)
    cache[0][tables[1, 3]] = math.nan
    query = randn(22, 4, size, seed=3, dtype=dtype)
    got = ops.attention(query, cache, step([1, 20, 1], lengths, tables), 0.25)
    assert got[0].isfinite().all()
    assert got[1:21].isnan().all()
    assert got[21].isfinite().all()
    linear = ops.pack_linear(randn(20, 16, dtype=dtype))
    x = randn(7, 16, dtype=dtype)
    x[2, 5] = math.nan
    assert linear(x).isnan().any(1).tolist() == [row == 2 for row in range(7)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_and_norm_at_the_ends_of_the_range(ops: NativeOps, dtype: torch.dtype) -> None:
    gates = torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 3e38, -3e38, 1e-30, -2.5, math.nan, math.inf]).to(dtype)
    x = torch.cat((gates, torch.ones_like(gates)))[None]
    got, wanted = ops.silu_mul(x), torch.nn.functional.silu(gates.double()).to(dtype)[None]
    assert torch.allclose(got, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-30, equal_nan=True)
    tiny = torch.full((2, 40), 1e-20, dtype=dtype)
    assert torch.equal(ops.rms_norm(tiny * 0, tiny[0], 1e-5), tiny * 0)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_fused_layers_equal_the_ops_one_by_one(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise equal for every variation of a layer; layers are reported one by one."""
    settings = {"mistral": {"sliding_window": 9}, "qwen3": {"attention_bias": True, "head_dim": 8}}.get(family, {})
    if family == "llama":
        make_checkpoint(tmp_path, attention_bias=True, mlp_bias=True)
    else:
        make_family_checkpoint(tmp_path, family, **settings)
    outputs: list[tuple[bytes, list[list[int]]]] = []
    reported: list[int] = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(NativeOps, "fuse_layers", lambda *_: None)
        loaded = load_model(tmp_path, device=cpu_with("native"), dtype=name, progress=False)  # type: ignore[arg-type]
        assert (loaded.model._fused is not None) == fused  # type: ignore[attr-defined]
        driver = EngineDriver(loaded)
        sequences = [driver.add(random_prompt(seed, 30)) for seed in range(3)]
        driver.step([(sequence, 11) for sequence in sequences], reported.append)
        driver.generate(sequences, 6)
        kv = b"".join(bytes(driver.cache.read(0, driver.cache.num_layers, s.blocks, 0, s.computed)) for s in sequences)
        outputs.append((kv, [sequence.output for sequence in sequences]))
    assert outputs[0] == outputs[1]
    layers = list(range(1, driver.cache.num_layers + 1))
    assert reported == layers + layers


def test_fused_layers_of_two_nodes_write_their_own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes in one process share a model: before each kernel of the first, the second computes a step."""
    make_checkpoint(tmp_path)
    loaded = load_model(tmp_path, device=cpu_with("native"), dtype="float32", progress=False)
    alone, first, second = (EngineDriver(loaded) for _ in range(3))
    layers = loaded.model._fused  # type: ignore[attr-defined]
    kernel, neighbour = layers._run, second.add(random_prompt(2, 30))

    def busy(*args: Any) -> None:
        layers._run = kernel
        second.step([(neighbour, 3)])
        kernel(*args)
        layers._run = busy

    found = []
    for driver in (alone, first):
        monkeypatch.setattr(layers, "_run", kernel if driver is alone else busy)
        sequence = driver.add(random_prompt(1, 20))
        driver.step([(sequence, 12)])
        driver.step([(sequence, 8)], lambda _: None)
        found.append((sequence.output, bytes(driver.cache.read(0, 2, sequence.blocks, 0, sequence.computed))))
    assert neighbour.computed > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_sequence_does_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    """Bitwise equal KV: alone on one thread, and in a batch on two threads, in other blocks and rows."""
    make_checkpoint(tmp_path)
    found = []
    for others, threads in ((0, 1), (5, 2)):
        device = cpu_with("native", threads)
        driver = EngineDriver(load_model(tmp_path, device=device, dtype=name, progress=False), device)  # type: ignore[arg-type]
        neighbour = [driver.add(random_prompt(10 + seed, 9 * seed + 5)) for seed in range(others)]
        sequence = driver.add(random_prompt(3, 61))
        driver.generate([*neighbour, sequence], 15, chunk=20)
        found.append((sequence.output, bytes(driver.cache.read(0, 2, sequence.blocks, 0, sequence.computed))))
    torch.set_num_threads(1)
    assert found[0] == found[1]
