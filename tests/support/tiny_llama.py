"""Small random Llama checkpoints on disk, and reference tokens from transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    # Wide random weights spread the logits, so that the arg-max does not depend on the last bit.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_checkpoint(directory: Path, max_shard_size: str = "1GB", **changes: Any) -> LlamaForCausalLM:
    """Save a random model (seeded) as a HuggingFace directory; returns it, in float32, as the reference."""
    torch.manual_seed(20)
    config = LlamaConfig(**{**BASE, **changes})
    model: LlamaForCausalLM = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        # Initial zeros and ones would hide whether biases and norms are applied.
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def reference_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by transformers' own generate."""
    generate: Any = model.generate
    out = generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=count,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def greedy_after(model: PreTrainedModel, prompt: list[int], output: list[int]) -> list[int]:
    """The reference's next token after the prompt plus each prefix of the output, in one forward pass.

    Equals the output exactly when that is the reference's own greedy continuation. Uses no cache: transformers' cache
    does not drop positions for a sliding window of one.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return tokens


def random_prompt(seed: int, length: int, vocab_size: int = 199) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()
