"""Small GGUF files, written with the `gguf` package from the weights of a tiny reference model."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

WORDS = ["hello", "world", "Ġhello", "Ġworld", "12"]
MARKS = ["<|im_start|>", "<|im_end|>"]
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (two marks, all bytes, then the results of the merges) and merges."""
    tokens = MARKS + sorted(ByteLevel.alphabet())
    merges = []
    for word in WORDS:
        if word[0] == "Ġ":
            tokens.append(word)
            merges.append(f"Ġ {word[1:]}")
            continue
        built = word[0]
        for letter in word[1:]:
            if built + letter not in tokens:
                tokens.append(built + letter)
                merges.append(f"{built} {letter}")
            built += letter
    return tokens, merges


def write_gguf(
    path: Path, model: PreTrainedModel | None = None, factors: torch.Tensor | None = None, **metadata: Any
) -> None:
    """Write the tokenizer and, if given, a model; `metadata` replaces or adds keys, a value of None removes the key."""
    writer = gguf.GGUFWriter(path, model.config.model_type if model else "llama")
    values = {**_tokenizer_metadata(), **(_model_metadata(model) if model else {}), **metadata}
    for key, value in values.items():
        _add(writer, key, value)
    if model is not None:
        for name, tensor in _tensors(model, factors).items():
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def _tokenizer_metadata() -> dict[str, Any]:
    tokens, merges = vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3 if token in MARKS else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }


def _model_metadata(model: PreTrainedModel) -> dict[str, Any]:
    c: Any = model.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    rope: Any = c.rope_parameters
    values = {
        "llama.block_count": c.num_hidden_layers,
        "llama.context_length": c.max_position_embeddings,
        "llama.embedding_length": c.hidden_size,
        "llama.feed_forward_length": c.intermediate_size,
        "llama.attention.head_count": c.num_attention_heads,
        "llama.attention.head_count_kv": c.num_key_value_heads,
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.freq_base": float(rope["rope_theta"]),
        "llama.attention.layer_norm_rms_epsilon": float(c.rms_norm_eps),
        "llama.vocab_size": c.vocab_size,
    }
    return {name.replace("llama", c.model_type): value for name, value in values.items()}


def _tensors(model: PreTrainedModel, factors: torch.Tensor | None) -> dict[str, np.ndarray]:
    c: Any = model.config
    out = {}
    for name, parameter in model.state_dict().items():
        values = parameter.float().numpy()
        parts = name.split(".")
        if parts[1] == "layers":
            kind = _NAMES[".".join(parts[3:-1])]
            heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads}.get(kind)
            if heads and c.model_type == "llama":
                # The row order of llama.cpp's converter: the halves of a head interleaved.
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            out[f"blk.{parts[2]}.{kind}.{parts[-1]}"] = np.ascontiguousarray(values)
        elif name == "lm_head.weight":
            if not c.tie_word_embeddings:
                out["output.weight"] = values
        else:
            out["token_embd.weight" if "embed" in name else "output_norm.weight"] = values
    if factors is not None:
        out["rope_freqs.weight"] = factors.numpy()
    return out
