"""Checkpoint settings: which are read, and which are refused by name because they would change results."""

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.models.load import LoadedModel, load_model, read_hf_config
from tests.support.tiny_llama import make_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    make_checkpoint(path, num_hidden_layers=1)
    return path


def change(path: Path, name: str = "config.json", **changes: Any) -> None:
    """Set keys of a JSON file; a value of None is written as null."""
    file = path / name
    values = orjson.loads(file.read_bytes()) if file.exists() else {}
    file.write_bytes(orjson.dumps({**values, **changes}))


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, device=CpuDevice(1), progress=False, **options)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GrokForCausalLM"]}, r"GrokForCausalLM.*LlamaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"a_setting_of_tomorrow": 3}, "a_setting_of_tomorrow = 3"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 7}}, "twist = 7"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a number"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"hidden_size": "wide"}, "hidden_size must be"),
        ({"num_key_value_heads": 4}, "do not divide"),
        ({"dtype": "float8"}, "float8"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"vocab_size": 7}, r"embed_tokens.*\(199, 48\)"),
        ({"num_hidden_layers": 2}, "no tensor model.layers.1"),
        ({"mlp_bias": True}, "no tensor model.layers.0.mlp.gate_proj.bias"),
    ],
)
def test_a_setting_that_would_change_results_is_refused_by_name(
    checkpoint: Path, changes: dict[str, Any], named: str
) -> None:
    change(checkpoint, **changes)
    with pytest.raises(ModelLoadError, match=named):
        load(checkpoint)


@pytest.mark.parametrize("name", ["sliding_window", "quantization_config", "something_else"])
@pytest.mark.parametrize("value", [None, False, [], {}])
def test_an_unknown_setting_without_a_value_is_accepted(checkpoint: Path, name: str, value: Any) -> None:
    change(checkpoint, **{name: value})
    assert read_hf_config(checkpoint).hidden_size == 48


def test_a_left_over_tensor_is_refused(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, file)
    with pytest.raises(ModelLoadError, match="q_norm"):
        load(checkpoint)


def test_redundant_tensors_are_accepted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, file)
    assert load(tmp_path).config.tie_word_embeddings


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(checkpoint: Path, missing: str) -> None:
    (checkpoint / missing).unlink()
    with pytest.raises(ModelLoadError, match=missing):
        load(checkpoint)


def test_broken_files_are_load_errors(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"\x10" * 40)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(checkpoint)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(checkpoint)
    with pytest.raises(ModelLoadError, match="neither"):
        load(tmp_path / "nowhere")


def test_shard_names_may_not_leave_the_directory(checkpoint: Path) -> None:
    change(checkpoint, "model.safetensors.index.json", weight_map={"x": "../other/model.safetensors"})
    with pytest.raises(ModelLoadError, match="weight_map"):
        load(checkpoint)


def test_generation_defaults(checkpoint: Path) -> None:
    change(checkpoint, eos_token_id=5, bos_token_id=1)
    config = read_hf_config(checkpoint)
    assert (config.eos_token_ids, config.default_top_k, config.default_do_sample) == ((5,), 1000, False)
    change(checkpoint, top_k=30)
    assert read_hf_config(checkpoint).default_top_k == 30
    change(checkpoint, "generation_config.json", eos_token_id=[7, 9], top_k=44, do_sample=True)
    info = load(checkpoint, model_name="m", max_model_len=100).info
    assert (info.eos_token_ids, info.default_top_k, info.default_do_sample) == ((7, 9), 44, True)
    assert (info.name, info.max_model_len, info.max_position_embeddings) == ("m", 100, 512)
    assert info.tokenizer_path == ""


def test_dtype_defaults_to_the_checkpoints_own(checkpoint: Path) -> None:
    assert load(checkpoint).dtype == torch.float32
    assert load(checkpoint, dtype="bfloat16").kv_specs[0].dtype == torch.bfloat16
    change(checkpoint, dtype="bfloat16")
    assert load(checkpoint).dtype == torch.bfloat16
    change(checkpoint, dtype="float16")
    with pytest.raises(ModelLoadError, match="set float32 or bfloat16"):
        load(checkpoint)


@pytest.mark.parametrize("length", [0, 513])
def test_a_length_beyond_the_models_limit_is_refused(checkpoint: Path, length: int) -> None:
    with pytest.raises(ModelLoadError, match="1 to 512"):
        load(checkpoint, max_model_len=length)


def test_identity_depends_on_content_not_on_path(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "elsewhere" / "two"
    make_checkpoint(one, num_hidden_layers=1)
    make_checkpoint(other, num_hidden_layers=1)
    change(other, eos_token_id=3, use_cache=False)
    identity = load(one).identity
    assert load(other, dtype="bfloat16").identity == identity
    change(other, rms_norm_eps=1e-4)
    assert load(other).identity != identity
    data = bytearray((one / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (one / "model.safetensors").write_bytes(data)
    assert load(one).identity != identity


def test_progress_goes_to_stderr_if_enabled(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(checkpoint)
    assert capsys.readouterr() == ("", "")
    load_model(checkpoint, device=CpuDevice(1), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading tiny" in err
