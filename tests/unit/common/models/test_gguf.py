"""GGUF files: the same tokens as the model they were written from; refusals name the key."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.models.gguf_config import read_gguf_config
from kvferry.common.models.load import load_model
from kvferry.common.models.weights import Part
from kvferry.common.models.weights_gguf import GgufWeights
from kvferry.common.tokenizer.gguf_header import read_gguf_header
from tests.support.engine_driver import EngineDriver
from tests.support.tiny_families import make_family_checkpoint
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_llama import make_checkpoint, random_prompt, reference_tokens

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def outputs(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    driver = EngineDriver(load_model(path, device=CpuDevice(1), dtype="float32", progress=False))
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.generate(sequences, 10)
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope", ["default", "linear", "llama3"])
def test_tokens_equal_those_of_the_source_model(tied: bool, rope: str, tmp_path: Path) -> None:
    metadata: dict[str, Any] = {}
    factors = None
    parameters: dict[str, Any] = {"rope_type": rope, "rope_theta": 500.0}
    if rope == "linear":
        parameters["factor"] = 4.0
        metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    elif rope == "llama3":
        parameters = LLAMA3
    reference = make_checkpoint(tmp_path / "hf", tie_word_embeddings=tied, head_dim=12, rope_parameters=parameters)
    if rope == "llama3":
        plain = 1.0 / 500.0 ** (torch.arange(0, 12, 2).float() / 12)
        factors = plain / reference.model.rotary_emb.inv_freq
        assert factors.max() > 7
    path = tmp_path / "m.gguf"
    write_gguf(path, reference, factors, **metadata)
    prompts = [random_prompt(n, n) for n in (1, 7, 60)]
    assert outputs(path, prompts) == [reference_tokens(reference, prompt, 10) for prompt in prompts]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(family: str, tied: bool, tmp_path: Path) -> None:
    """Qwen2 with its biases, Qwen3 with its head norms; neither has reordered rows."""
    parameters = {"rope_type": "default", "rope_theta": 500.0}
    reference = make_family_checkpoint(tmp_path / "hf", family, tie_word_embeddings=tied, rope_parameters=parameters)
    path = tmp_path / "m.gguf"
    write_gguf(path, reference)
    prompts = [random_prompt(n, n) for n in (1, 7, 60)]
    assert outputs(path, prompts) == [reference_tokens(reference, prompt, 10) for prompt in prompts]


def test_an_unsupported_gguf_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_family_checkpoint(tmp_path / "hf", "qwen3", num_hidden_layers=1))
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"gemma"))
    with pytest.raises(ModelLoadError, match="'gemma' is not supported; known are llama, qwen2, qwen3"):
        load_model(path, device=CpuDevice(1), progress=False)


def test_info_comes_from_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "some-model.gguf"
    metadata: dict[str, Any] = {"tokenizer.ggml.eot_token_id": 9}
    write_gguf(path, make_checkpoint(tmp_path / "hf", num_hidden_layers=1), **metadata)
    loaded = load_model(path, device=CpuDevice(1), progress=False)
    assert loaded.dtype == torch.bfloat16
    assert loaded.info.name == "some-model"
    assert loaded.info.eos_token_ids == (1, 9)
    assert loaded.config.bos_token_id == 0
    assert loaded.info.default_top_k == 1000
    assert loaded.info.tokenizer_path == str(path.resolve())


@pytest.mark.parametrize(
    "kind", [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16]
)
def test_quantised_tensors_are_dequantised(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    config_path, path = tmp_path / "config.gguf", tmp_path / "m.gguf"
    write_gguf(config_path, reference)
    config = read_gguf_config(read_gguf_header(config_path))
    values = np.random.default_rng(1).normal(size=(6, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufWeights(path, read_gguf_header(path), config) as weights:
        got = weights.get("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(got, torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind)))
    assert (got - torch.from_numpy(values)).abs().max() < 0.4


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "mamba"}, "'mamba'.*known are llama"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 4}, "dimension_count"),
        ({"llama.attention.value_length": 16}, "value_length"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 4096}, "sliding_window"),
        ({"llama.logit_scale": 0.25}, "logit_scale"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv"),
        ({"llama.attention.head_count_kv": 4}, "do not divide"),
        ({"llama.embedding_length": 40}, "token_embd|embed_tokens"),
        ({"llama.block_count": None}, "block_count"),
        ({"llama.block_count": 2}, "no tensor model.layers.1"),
    ],
)
def test_refused_by_name(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint(tmp_path / "hf", num_hidden_layers=1), **metadata)
    if "general.architecture" in metadata:
        path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ModelLoadError, match=named):
        load_model(path, device=CpuDevice(1), progress=False)


@pytest.mark.parametrize("keep", [0, 3, 10, 100, 5000])
def test_a_truncated_file_is_a_load_error(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint(tmp_path / "hf", num_hidden_layers=1))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match="cannot be read" if keep > 3 else "is not a GGUF file"):
        load_model(path, device=CpuDevice(1), progress=False)


def test_truncated_weights_are_a_load_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint(tmp_path / "hf", num_hidden_layers=1))
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(ModelLoadError, match="ends too early"):
        load_model(path, device=CpuDevice(1), progress=False)


def test_a_part_equals_the_same_slice_of_the_whole_tensor(tmp_path: Path) -> None:
    """Includes rows in llama.cpp's order: a part consists of whole heads."""
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint(tmp_path / "hf", num_key_value_heads=3))
    header = read_gguf_header(path)
    with GgufWeights(path, header, read_gguf_config(header)) as weights:
        for name in weights.names():
            whole = weights.get(name)
            assert weights.shape(name) == tuple(whole.shape)
            for axis, length in enumerate(whole.shape):
                part = Part(axis, length // 3, 2 * length // 3)
                assert torch.equal(weights.get(name, part), part.cut(whole)), name
