"""Which architectures can be served, by name alone: no torch, so that a launcher can ask. Classes: `registry`."""

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.settings import Settings

_KNOWN = frozenset({
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
})  # fmt: skip


def known_architectures() -> tuple[str, ...]:
    """Every architecture that can be served, sorted."""
    return tuple(sorted(_KNOWN))


def require_known(architecture: str) -> None:
    """Raises ModelLoadError with the list of known ones."""
    if architecture not in _KNOWN:
        known = ", ".join(known_architectures())
        raise ModelLoadError(f"architecture {architecture} is not supported; known are {known}")


def architecture_of(settings: Settings) -> str:
    """The one class name under `architectures` of a config.json."""
    names = settings.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError(f"config.json: architectures must name one architecture, found {names!r}")
    return names[0]
