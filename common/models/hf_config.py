"""Reads config.json and generation_config.json of a HuggingFace directory. Knows settings, not tensors."""

from collections.abc import Mapping
from pathlib import Path

import orjson

from common.errors import ModelLoadError
from common.models.config import ModelConfig, RopeConfig
from common.models.rope import rope_from_settings
from common.models.settings import Settings

_HARMLESS = frozenset({
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "pad_token_id",
    "initializer_range", "attention_dropout", "pretraining_tp", "return_dict", "output_hidden_states",
    "output_attentions", "id2label", "label2id", "problem_type", "chunk_size_feed_forward", "is_llama_config",
    "unsloth_version", "unsloth_fixed", "tokenizer_class", "finetuning_task", "task_specific_params", "name_or_path",
    "hidden_dropout", "max_length", "temperature", "top_p", "tie_encoder_decoder",
})  # fmt: skip
"""Settings of training, of the library, or of generation elsewhere: they do not change the logits."""
_HARMLESS_PREFIXES = ("_", "transformers.js")
_DTYPES = ("float32", "bfloat16", "float16")
_DEFAULT_TOP_K = 1000


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file. Raises ModelLoadError when it is missing or is something else."""
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return value


def read_hf_config(directory: Path) -> ModelConfig:
    """The configuration of a HuggingFace directory. Raises ModelLoadError, naming the setting."""
    values = read_json(directory / "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return llama_config(values, generation)


def architecture_of(values: Mapping[str, object]) -> str:
    """The one class name under `architectures`."""
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(f"config.json: architectures must name one architecture, found {names!r}")
    return names[0]


def llama_config(values: Mapping[str, object], generation: Mapping[str, object]) -> ModelConfig:
    """The Llama family's settings; refuses every other one that says something."""
    settings = Settings(values, "config.json")
    settings.require("hidden_act", ("silu",))
    settings.require("rope_interleaved", (False,))
    heads = settings.integer("num_attention_heads")
    hidden = settings.integer("hidden_size")
    max_positions = settings.integer("max_position_embeddings", 2048)
    head_dim = settings.integer("head_dim", hidden // heads)
    config = ModelConfig(
        architecture=architecture_of(values),
        hidden_size=hidden,
        num_layers=settings.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=settings.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=_rope(settings, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=settings.flag("tie_word_embeddings"),
        attention_bias=settings.flag("attention_bias"),
        mlp_bias=settings.flag("mlp_bias"),
        checkpoint_dtype=_dtype(values),
        eos_token_ids=_token_ids(generation.get("eos_token_id"), settings.get("eos_token_id")),
        bos_token_id=settings.optional_integer("bos_token_id"),
        default_top_k=_default_top_k(generation, settings),
        default_do_sample=bool(generation.get("do_sample", settings.get("do_sample") or False)),
    )
    settings.refuse_rest(_HARMLESS, _HARMLESS_PREFIXES)
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ModelLoadError(
            f"config.json: {config.num_heads} heads over {config.num_kv_heads} key-value heads of size "
            f"{config.head_dim} do not divide evenly"
        )
    return config


def _rope(settings: Settings, max_positions: int) -> RopeConfig:
    """From `rope_parameters` (newer files) or `rope_theta` and `rope_scaling` (older ones)."""
    theta = settings.number("rope_theta", 10000.0)
    merged: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise settings.unsupported(name, value)
        merged.update(value)
    return rope_from_settings(merged, theta, max_positions, "config.json: rope scaling")


def _dtype(values: Mapping[str, object]) -> str:
    name = values.get("dtype") or values.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ModelLoadError(f"config.json: dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return str(name)


def _token_ids(*candidates: object) -> tuple[int, ...]:
    """The first candidate that is there: one id or a list of them."""
    for value in candidates:
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            return tuple(ids)
        raise ModelLoadError(f"eos_token_id must be an id or a list of ids, found {value!r}")
    return ()


def _default_top_k(generation: Mapping[str, object], settings: Settings) -> int:
    for value in (generation.get("top_k"), settings.get("top_k")):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return _DEFAULT_TOP_K
