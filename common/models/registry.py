"""Architecture names to model families. A new family adds a line here, its name to `architectures`
and one file beside it."""

from kvferry.common.models import deepseek, llama, mistral, qwen2, qwen3, qwen3_moe
from kvferry.common.models.architectures import require_known
from kvferry.common.models.family import Family

_FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": deepseek.FAMILY_V2,
    "DeepseekV3ForCausalLM": deepseek.FAMILY_V3,
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}


def family(architecture: str) -> Family:
    """The family of an architecture. Raises ModelLoadError with the list of known ones."""
    require_known(architecture)
    return _FAMILIES[architecture]
