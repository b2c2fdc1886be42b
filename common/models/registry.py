"""The registry of model families: architecture name -> the `Family` that serves it.

Imports no torch, so that a launcher can check a checkpoint's architecture; a family's module is imported when its
model is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.settings import Settings

if TYPE_CHECKING:
    from kvferry.common.models.family import Family

_MODELS = "kvferry.common.models"
FAMILIES = {
    "DeepseekV2ForCausalLM": f"{_MODELS}.deepseek:FAMILY_V2",
    "DeepseekV3ForCausalLM": f"{_MODELS}.deepseek:FAMILY_V3",
    "LlamaForCausalLM": f"{_MODELS}.llama:FAMILY",
    "MistralForCausalLM": f"{_MODELS}.mistral:FAMILY",
    "Qwen2ForCausalLM": f"{_MODELS}.qwen2:FAMILY",
    "Qwen3ForCausalLM": f"{_MODELS}.qwen3:FAMILY",
    "Qwen3MoeForCausalLM": f"{_MODELS}.qwen3_moe:FAMILY",
}
"""Class name in config.json -> "module:attribute" of a Family."""


def known_architectures() -> tuple[str, ...]:
    """All supported architectures, sorted."""
    return tuple(sorted(FAMILIES))


def require_known(architecture: str) -> None:
    """Raise ModelLoadError with the list of supported architectures if this one is not among them."""
    if architecture not in FAMILIES:
        known = ", ".join(known_architectures())
        raise ModelLoadError(f"architecture {architecture} is not supported; known are {known}")


def family(architecture: str) -> "Family":
    """Import and return the family of an architecture. Raises ModelLoadError if it is not supported."""
    require_known(architecture)
    module, attribute = FAMILIES[architecture].split(":")
    found: Family = getattr(import_module(module), attribute)
    return found


def architecture_of(settings: Settings) -> str:
    """The class name under `architectures` of a config.json, which must be exactly one."""
    names = settings.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(f"config.json: architectures must name one architecture, found {names!r}")
    return names[0]
