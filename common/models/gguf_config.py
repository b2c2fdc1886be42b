"""Reads a model's configuration from GGUF metadata. Knows settings, not tensors."""

from common.errors import ModelLoadError
from common.models.config import ModelConfig, RopeConfig
from common.models.settings import Settings
from common.tokenizer.gguf_header import GgufHeader

_ARCHITECTURES = {"llama": "LlamaForCausalLM"}
_DEFAULT_TOP_K = 1000


def read_gguf_config(header: GgufHeader) -> ModelConfig:
    """The configuration of a GGUF file. Raises ModelLoadError, naming what is missing or not supported."""
    settings = Settings(header.metadata, "GGUF metadata")
    family = settings.text("general.architecture")
    if family not in _ARCHITECTURES:
        raise ModelLoadError(
            f"GGUF architecture {family!r} is not supported; known are {', '.join(sorted(_ARCHITECTURES))}"
        )
    names = {tensor.name for tensor in header.tensors}
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelLoadError("the GGUF file has no tensor token_embd.weight")
    config = _llama(settings, shapes["token_embd.weight"][-1], tied="output.weight" not in names)
    settings.refuse_rest((), ("general.", "tokenizer.", "GGUF.", "quantize.", "split."))
    return config


def _llama(settings: Settings, vocab_size: int, *, tied: bool) -> ModelConfig:
    heads = settings.integer("llama.attention.head_count")
    hidden = settings.integer("llama.embedding_length")
    head_dim = settings.integer("llama.attention.key_length", hidden // heads)
    kv_heads = settings.integer("llama.attention.head_count_kv", heads)
    settings.require("llama.attention.value_length", (head_dim,))
    settings.require("llama.rope.dimension_count", (head_dim,))
    settings.require("llama.vocab_size", (vocab_size,))
    settings.require("llama.expert_count", (0,))
    settings.require("llama.expert_used_count", (0,))
    settings.require("split.count", (0, 1))
    if heads % kv_heads or head_dim % 2:
        raise ModelLoadError(f"GGUF metadata: {heads} heads over {kv_heads} of size {head_dim} do not divide evenly")
    eos = settings.optional_integer("tokenizer.ggml.eos_token_id")
    eot = settings.optional_integer("tokenizer.ggml.eot_token_id")
    return ModelConfig(
        architecture=_ARCHITECTURES["llama"],
        hidden_size=hidden,
        num_layers=settings.integer("llama.block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=settings.integer("llama.feed_forward_length"),
        vocab_size=vocab_size,
        rms_norm_eps=settings.number("llama.attention.layer_norm_rms_epsilon"),
        rope=_rope(settings),
        max_position_embeddings=settings.integer("llama.context_length"),
        tie_word_embeddings=tied,
        checkpoint_dtype="bfloat16",
        eos_token_ids=tuple(dict.fromkeys(token for token in (eos, eot) if token is not None)),
        bos_token_id=settings.optional_integer("tokenizer.ggml.bos_token_id"),
        default_top_k=_DEFAULT_TOP_K,
    )


def _rope(settings: Settings) -> RopeConfig:
    theta = settings.number("llama.rope.freq_base", 10000.0)
    kind = settings.text("llama.rope.scaling.type", "none")
    if kind == "none":
        settings.require("llama.rope.scaling.factor", (1.0,))
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", settings.number("llama.rope.scaling.factor"))
    raise settings.unsupported("llama.rope.scaling.type", kind)
