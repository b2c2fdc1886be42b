"""Settings of each family: which are read, and which are refused by name because they would change results."""

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.decoder import DecoderModel
from kvferry.common.models.load import load_model, read_hf_config
from kvferry.common.models.registry import FAMILIES, family, known_architectures
from tests.support.tiny_families import CONFIGS, make_family_checkpoint

ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved model per family."""
    root = tmp_path_factory.mktemp("families")
    for name in CONFIGS:
        make_family_checkpoint(root / name, name)
    return {name: root / name for name in CONFIGS}


def read(original: Path, directory: Path, **changes: Any) -> TransformerConfig:
    """The configuration with some settings changed; a value of `...` removes the setting."""
    values = {**orjson.loads((original / "config.json").read_bytes()), **changes}
    values = {name: value for name, value in values.items() if value is not ...}
    (directory / "config.json").write_bytes(orjson.dumps(values))
    return read_hf_config(directory)


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones() -> None:
    assert known_architectures() == ARCHITECTURES
    with pytest.raises(ModelLoadError) as caught:
        family("GrokForCausalLM")
    assert str(caught.value) == f"architecture GrokForCausalLM is not supported; known are {', '.join(ARCHITECTURES)}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_registered_family_loads(architecture: str) -> None:
    found = family(architecture)
    assert issubclass(found.model, DecoderModel)
    assert callable(found.read_config)


def test_one_line_registers_a_family(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "MadeUpForCausalLM", "kvferry.common.models.qwen2:FAMILY")
    config = read(checkpoints["qwen2"], tmp_path, architectures=["MadeUpForCausalLM"])
    assert config.architecture == "MadeUpForCausalLM"
    assert "MadeUpForCausalLM" in known_architectures()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"a_setting_of_tomorrow": 3}, "a_setting_of_tomorrow = 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale without"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": 0.7}}, "mscale without"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.7}}, "mscale_all_dim"),
        ({"max_position_embeddings": ...}, "max_position_embeddings"),
        ({"num_attention_heads": 7}, "divide|num_key_value_heads"),
    ],
)
def test_refused_in_every_family(
    name: str, changes: dict[str, Any], named: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        read(checkpoints[name], tmp_path, **changes)


SLIDING = ["sliding_attention"] * 3


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"mlp_bias": True}, "mlp_bias"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"layer_types": SLIDING}, "layer_types"),
        ("mistral", {"num_key_value_heads": ...}, "num_key_value_heads"),
        ("qwen2", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"layer_types": SLIDING}, "use_sliding_window"),
        ("qwen2", {"layer_types": SLIDING[:2]}, "layer_types"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, "sliding_window"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": "wide"}, "sliding_window"),
        ("qwen3", {"max_window_layers": -1}, "max_window_layers"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "max_window_layers"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "7 of 6 experts"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "3 groups"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v2", {"qk_rope_head_dim": 7, "head_dim": 7, "qk_head_dim": 19}, "qk_rope_head_dim"),
        ("deepseek_v2", {"n_shared_experts": None}, "n_shared_experts"),
        ("deepseek_v2", {"rope_interleave": True}, "rope_interleave"),
        ("deepseek_v2", {"head_dim": 20}, "head_dim"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"n_group": None}, "n_group"),
        ("deepseek_v3", {"n_group": 8}, "8 groups"),
        ("deepseek_v3", {"topk_group": 1}, "from 1 of 4 groups"),
        ("deepseek_v3", {"topk_group": 5}, "5 of 4 groups"),
        ("deepseek_v3", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v3", {"sliding_window": 16}, "sliding_window"),
    ],
)
def test_refused_in_one_family(
    name: str, changes: dict[str, Any], named: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        read(checkpoints[name], tmp_path, **changes)


def test_windows_follow_each_familys_rules(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    mistral, qwen = checkpoints["mistral"], checkpoints["qwen2"]
    assert read(mistral, tmp_path, sliding_window=None).windows == ()
    assert read(mistral, tmp_path, sliding_window=...).windows == (4096,) * 3
    assert read(mistral, tmp_path, sliding_window=12).windows == (12,) * 3
    used = {"use_sliding_window": True, "sliding_window": 12, "layer_types": ...}
    assert read(qwen, tmp_path, **used, max_window_layers=1).windows == (0, 12, 12)
    assert read(qwen, tmp_path, **used, max_window_layers=...).windows == ()
    assert read(qwen, tmp_path, sliding_window=12, max_window_layers=0, layer_types=...).windows == ()


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize("first", [0, 1, 2, 3, 9])
def test_layers_with_a_window_match_transformers(
    name: str, first: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Published files have no layer types; files written by transformers always do."""
    used = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": first}
    config = read(checkpoints[name], tmp_path, **used, layer_types=...)
    library: Any = CONFIGS[name][0]
    kinds: list[str] = library(num_hidden_layers=3, **used).layer_types
    assert [config.window(layer) == 12 for layer in range(3)] == [kind == "sliding_attention" for kind in kinds]


def test_published_settings_without_effect_are_accepted(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Settings of published files that transformers does not write."""
    remote = {
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "head_dim": ...,
        "qk_head_dim": ...,
    }
    training = {"ep_size": 1, "moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": True}
    config = read(
        checkpoints["deepseek_v3"], tmp_path, **remote, **training, topk_method="noaux_tc", scoring_func="sigmoid",
        num_nextn_predict_layers=2,
    )  # fmt: skip
    assert config.extra_layers == 2
    greedy = read(checkpoints["deepseek_v2"], tmp_path, topk_method="greedy", n_group=1, topk_group=1)
    assert greedy.moe is not None
    assert (greedy.moe.num_groups, greedy.moe.scoring) == (1, "softmax")
    moe = read(checkpoints["qwen3_moe"], tmp_path, max_window_layers=48, num_experts=6, num_local_experts=...).moe
    assert moe is not None
    assert (moe.num_experts, moe.layers) == (6, (0, 1, 2))


def test_layers_for_multi_token_prediction_are_not_loaded(tmp_path: Path) -> None:
    make_family_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=1, num_mtp_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.1.eh_proj.weight": torch.ones(3)}, file)
    load_model(tmp_path, device=CpuDevice(1), progress=False)
    save_file({**tensors, "model.layers.2.eh_proj.weight": torch.ones(3)}, file)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.eh_proj"):
        load_model(tmp_path, device=CpuDevice(1), progress=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_left_over_tensor_is_refused(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = checkpoints[name]
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.sinks": torch.ones(6)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="sinks"):
        load_model(tmp_path, device=CpuDevice(1), progress=False)


def test_settings_that_determine_the_logits_are_in_the_digest(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    changes: list[tuple[str, dict[str, Any]]] = [
        ("mistral", {"sliding_window": 12}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("deepseek_v2", {"routed_scaling_factor": 3.0}),
        ("deepseek_v3", {"rope_interleave": False}),
    ]
    for name, change in changes:
        assert read(checkpoints[name], tmp_path).digest() != read(checkpoints[name], tmp_path, **change).digest()
