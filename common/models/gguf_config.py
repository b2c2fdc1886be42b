"""Reads a model's configuration from GGUF metadata. Reads no tensor data."""

from dataclasses import dataclass

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.config import RopeConfig, TransformerConfig
from kvferry.common.models.settings import Settings
from kvferry.common.tokenizer.gguf_header import GgufHeader


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    attention_bias: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "qwen2": _Family("Qwen2ForCausalLM", attention_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", qk_norm=True),
}
_DEFAULT_TOP_K = 1000


def read_gguf_config(header: GgufHeader) -> TransformerConfig:
    """The configuration of a GGUF file. Raises ModelLoadError naming the key that is missing or not supported."""
    settings = Settings(header.metadata, "GGUF metadata")
    name = settings.text("general.architecture")
    if name not in _FAMILIES:
        raise ModelLoadError(f"GGUF architecture {name!r} is not supported; known are {', '.join(sorted(_FAMILIES))}")
    names = {tensor.name for tensor in header.tensors}
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelLoadError("the GGUF file has no tensor token_embd.weight")
    config = _decoder(settings, name, shapes["token_embd.weight"][-1], tied="output.weight" not in names)
    settings.refuse_rest((), ("general.", "tokenizer.", "GGUF.", "quantize.", "split."))
    return config


def _decoder(settings: Settings, name: str, vocab_size: int, *, tied: bool) -> TransformerConfig:
    family = _FAMILIES[name]
    heads = settings.integer(f"{name}.attention.head_count")
    hidden = settings.integer(f"{name}.embedding_length")
    head_dim = settings.integer(f"{name}.attention.key_length", hidden // heads)
    kv_heads = settings.integer(f"{name}.attention.head_count_kv", heads)
    settings.require(f"{name}.attention.value_length", (head_dim,))
    settings.require(f"{name}.rope.dimension_count", (head_dim,))
    settings.require(f"{name}.vocab_size", (vocab_size,))
    settings.require(f"{name}.expert_count", (0,))
    settings.require(f"{name}.expert_used_count", (0,))
    settings.require("split.count", (0, 1))
    if heads % kv_heads or head_dim % 2:
        raise ModelLoadError(f"GGUF metadata: {heads} heads over {kv_heads} of size {head_dim} do not divide evenly")
    eos = settings.optional_integer("tokenizer.ggml.eos_token_id")
    eot = settings.optional_integer("tokenizer.ggml.eot_token_id")
    return TransformerConfig(
        architecture=family.architecture,
        hidden_size=hidden,
        num_layers=settings.integer(f"{name}.block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=settings.integer(f"{name}.feed_forward_length"),
        vocab_size=vocab_size,
        rms_norm_eps=settings.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope=_rope(settings, name),
        max_position_embeddings=settings.integer(f"{name}.context_length"),
        tie_word_embeddings=tied,
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
        checkpoint_dtype="bfloat16",
        eos_token_ids=tuple(dict.fromkeys(token for token in (eos, eot) if token is not None)),
        bos_token_id=settings.optional_integer("tokenizer.ggml.bos_token_id"),
        default_top_k=_DEFAULT_TOP_K,
    )


def _rope(settings: Settings, name: str) -> RopeConfig:
    theta = settings.number(f"{name}.rope.freq_base", 10000.0)
    kind = settings.text(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        settings.require(f"{name}.rope.scaling.factor", (1.0,))
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", settings.number(f"{name}.rope.scaling.factor"))
    raise settings.unsupported(f"{name}.rope.scaling.type", kind)
