"""Architecture names to model families. A new family adds one line here and one file beside it."""

from common.errors import ModelLoadError
from common.models import deepseek, llama, mistral, qwen2, qwen3, qwen3_moe
from common.models.family import Family

_FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": deepseek.FAMILY_V2,
    "DeepseekV3ForCausalLM": deepseek.FAMILY_V3,
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}


def known_architectures() -> tuple[str, ...]:
    """Every architecture that can be served, sorted."""
    return tuple(sorted(_FAMILIES))


def family(architecture: str) -> Family:
    """The family of an architecture. Raises ModelLoadError with the list of known ones."""
    if architecture not in _FAMILIES:
        known = ", ".join(known_architectures())
        raise ModelLoadError(f"architecture {architecture} is not supported; known are {known}")
    return _FAMILIES[architecture]
