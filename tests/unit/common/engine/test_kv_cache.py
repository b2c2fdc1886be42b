"""The cache in wire order: the order itself, round trips, and decoding that continues in another cache."""

from pathlib import Path

import pytest
import torch

from kvferry.common.device.base import KvTensorSpec
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.engine.kv_cache import KvCache, bytes_per_token, num_blocks_for
from kvferry.common.models.load import LoadedModel, load_model
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_llama import make_checkpoint, random_prompt

SPECS = (KvTensorSpec("key", (2, 3), torch.float32), KvTensorSpec("latent", (5,), torch.bfloat16, None))
LAYERS, BLOCKS, BLOCK_SIZE = 3, 9, 4


def make_cache(block_size: int = BLOCK_SIZE) -> KvCache:
    cache = KvCache(CpuDevice(), SPECS, LAYERS, BLOCKS, block_size)
    cache.check_invariants()
    return cache


def random_bytes(length: int) -> bytes:
    """Bytes 0 to 63: no value composed of them is NaN, in any dtype."""
    generator = torch.Generator().manual_seed(length)
    return bytes(torch.randint(0, 64, (length,), generator=generator, dtype=torch.uint8).tolist())


def test_sizes() -> None:
    assert bytes_per_token(SPECS, LAYERS) == LAYERS * (2 * 3 * 4 + 5 * 2)
    assert make_cache().num_bytes == bytes_per_token(SPECS, LAYERS) * BLOCKS * BLOCK_SIZE
    assert num_blocks_for(make_cache().num_bytes, SPECS, LAYERS, BLOCK_SIZE) == BLOCKS
    assert num_blocks_for(make_cache().num_bytes - 1, SPECS, LAYERS, BLOCK_SIZE) == BLOCKS - 1


def test_wire_order_is_layer_tensor_token_value() -> None:
    cache = make_cache()
    table, device = [5, 2], CpuDevice()
    parts = []
    for layer in range(1, 3):
        for tensor, spec in zip(cache.layers[layer], SPECS, strict=True):
            values = torch.arange(8 * torch.Size(spec.shape_per_token).numel()).view(8, *spec.shape_per_token)
            tokens = (values + 50 * layer).to(spec.dtype)
            slots = torch.tensor([table[position // 4] * 4 + position % 4 for position in range(8)])
            device.write_tokens(tensor, slots, tokens)
            parts.append(tokens[3:7].contiguous().view(torch.uint8).flatten())
    assert bytes(cache.read(1, 3, table, 3, 7)) == bytes(torch.cat(parts).tolist())


@pytest.mark.parametrize(("start", "end"), [(0, 12), (0, 1), (3, 5), (4, 8), (7, 11)])
@pytest.mark.parametrize("layers", [(0, 3), (1, 2)])
def test_written_bytes_are_read_back_and_nothing_else_changes(start: int, end: int, layers: tuple[int, int]) -> None:
    cache, table = make_cache(), [7, 0, 4]
    everything = random_bytes(cache.range_bytes(0, LAYERS, 0, 12))
    cache.write(0, LAYERS, table, 0, 12, everything)
    assert bytes(cache.read(0, LAYERS, table, 0, 12)) == everything
    piece = random_bytes(cache.range_bytes(*layers, start, end))
    cache.write(*layers, table, start, end, piece)
    assert bytes(cache.read(*layers, table, start, end)) == piece
    cache.write(*layers, table, start, end, _cut(everything, layers, start, end))
    assert bytes(cache.read(0, LAYERS, table, 0, 12)) == everything
    assert not any(bytes(cache.read(0, LAYERS, [1, 2, 3, 5, 6, 8], 0, 24)))


def _cut(everything: bytes, layers: tuple[int, int], start: int, end: int) -> bytes:
    """Select layers and tokens from bytes read over 12 tokens of all layers."""
    cut, at = b"", 0
    for layer in range(LAYERS):
        for size in (2 * 3 * 4, 5 * 2):
            if layers[0] <= layer < layers[1]:
                cut += everything[at + start * size : at + end * size]
            at += 12 * size
    return cut


@pytest.mark.rule(23)
def test_a_cache_of_another_block_size_accepts_the_same_bytes() -> None:
    one, other = make_cache(4), make_cache(8)
    data = random_bytes(one.range_bytes(0, LAYERS, 0, 11))
    one.write(0, LAYERS, [3, 1, 2], 0, 11, data)
    other.write(0, LAYERS, [6, 5], 0, 11, one.read(0, LAYERS, [3, 1, 2], 0, 11))
    assert bytes(other.read(0, LAYERS, [6, 5], 0, 11)) == data


def test_invalid_ranges_are_rejected_without_any_change() -> None:
    cache = make_cache()
    with pytest.raises(ValueError, match="bytes for a range"):
        cache.write(0, 1, [0], 0, 4, b"short")
    for layers, table, tokens in [
        ((0, 4), [0], (0, 4)),
        ((2, 2), [0], (0, 4)),
        ((0, 1), [0], (0, 5)),
        ((0, 1), [0], (2, 2)),
        ((0, 1), [9], (0, 4)),
        ((0, 1), [-1], (0, 4)),
    ]:
        with pytest.raises(ValueError, match=r"layers|tokens|block"):
            cache.read(*layers, table, *tokens)
    with pytest.raises(ValueError, match="holds nothing"):
        KvCache(CpuDevice(), SPECS, LAYERS, 0, 4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return load_model(path, device=CpuDevice(), progress=False)


@pytest.mark.parametrize("cached", [0, 8])
def test_decoding_continues_in_another_cache_with_the_same_tokens(loaded: LoadedModel, cached: int) -> None:
    """Computed on one node, transferred in groups of layers, decoded on another with other blocks and block size."""
    prompt = random_prompt(8, 37)
    here = EngineDriver(loaded, block_size=4)
    undisturbed = here.add(prompt)
    here.generate([undisturbed], 15)
    source = here.add(prompt)
    here.generate([source], 1)
    there = EngineDriver(loaded, block_size=8)
    if cached:
        first = there.add(prompt[:cached])
        there.generate([first], 1)
    target = there.add(source.ids, prompt_length=len(prompt))
    if cached:
        there.share_prefix(first, target, cached // 8)
    there.reserve(target, len(prompt))
    for layers in ((2, 3), (0, 2)):
        data = here.cache.read(*layers, source.blocks, cached, len(prompt))
        there.cache.write(*layers, target.blocks, cached, len(prompt), data)
    target.computed = len(prompt)
    there.generate([target], 15)
    assert target.output == undisturbed.output
