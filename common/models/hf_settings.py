"""Reads the config.json settings that all families of decoders have in common. Names no family."""

from collections.abc import Mapping

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.config import RopeConfig, TransformerConfig
from kvferry.common.models.family import HfSettings
from kvferry.common.models.registry import architecture_of
from kvferry.common.models.rope import rope_from_settings
from kvferry.common.models.settings import Settings

HARMLESS = frozenset({
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "pad_token_id",
    "initializer_range", "attention_dropout", "pretraining_tp", "return_dict", "output_hidden_states",
    "output_attentions", "id2label", "label2id", "problem_type", "chunk_size_feed_forward", "is_llama_config",
    "unsloth_version", "unsloth_fixed", "tokenizer_class", "finetuning_task", "task_specific_params", "name_or_path",
    "hidden_dropout", "max_length", "temperature", "top_p", "tie_encoder_decoder",
})  # fmt: skip
"""Settings of training, of transformers, or of generation in other programs: they do not change the logits."""
HARMLESS_PREFIXES = ("_", "transformers.js")
_DTYPES = ("float32", "bfloat16", "float16")
_DEFAULT_TOP_K = 1000
_SLIDING, _FULL = "sliding_attention", "full_attention"


def decoder_config(hf: HfSettings, *, num_kv_heads: int, head_dim: int, max_positions: int) -> TransformerConfig:
    """The settings that all decoders have in common; a family's reader adds its own with `replace`."""
    settings, generation = hf.model, hf.generation
    settings.require("hidden_act", ("silu",))
    heads = settings.integer("num_attention_heads")
    if heads % num_kv_heads or head_dim % 2:
        raise ModelLoadError(
            f"config.json: {heads} heads over {num_kv_heads} key-value heads of size {head_dim} do not divide evenly"
        )
    return TransformerConfig(
        architecture=architecture_of(settings),
        hidden_size=settings.integer("hidden_size"),
        num_layers=settings.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=_rope(settings, max_positions),
        max_position_embeddings=max_positions,
        tie_word_embeddings=settings.flag("tie_word_embeddings"),
        checkpoint_dtype=_dtype(settings),
        eos_token_ids=_token_ids(generation.get("eos_token_id"), settings.get("eos_token_id")),
        bos_token_id=settings.optional_integer("bos_token_id"),
        default_top_k=_default_top_k(generation, settings),
        default_do_sample=bool(generation.get("do_sample", settings.get("do_sample") or False)),
    )


def default_head_dim(settings: Settings) -> int:
    """`head_dim`, else the hidden size divided by the number of heads."""
    return settings.integer("head_dim", settings.integer("hidden_size") // settings.integer("num_attention_heads"))


def layer_windows(settings: Settings, num_layers: int) -> tuple[int, ...]:
    """The window of each layer (0: none), by the rules of Qwen2 and Qwen3.

    `sliding_window` takes effect only with `use_sliding_window`. It applies to the layers that `layer_types` calls
    sliding or, without `layer_types`, to those from index `max_window_layers`.
    """
    window = _window_in_use(settings)
    first = settings.whole_number("max_window_layers", 28)
    types = settings.get("layer_types")
    if types is None:
        types = [_SLIDING if window and layer >= first else _FULL for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not all(t in (_SLIDING, _FULL) for t in types):
        raise settings.unsupported("layer_types", types)
    if _SLIDING not in types:
        return ()
    if not window:
        raise ModelLoadError("config.json: layer_types has sliding_attention, but use_sliding_window is not true")
    return tuple(window if kind == _SLIDING else 0 for kind in types)


def _window_in_use(settings: Settings) -> int:
    if settings.flag("use_sliding_window"):
        return settings.integer("sliding_window")
    settings.ignore("sliding_window")
    return 0


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


def _dtype(settings: Settings) -> str:
    name = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ModelLoadError(f"config.json: dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return str(name)


def _token_ids(*candidates: object) -> tuple[int, ...]:
    """The first candidate that is not None: an id or a list of ids."""
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
