"""Architecture names to model classes. A new family adds one line here and one file beside it."""

from common.errors import ModelLoadError
from common.models.causal_lm import CausalLM
from common.models.llama import LlamaModel

_FAMILIES: dict[str, type[CausalLM]] = {"LlamaForCausalLM": LlamaModel}


def known_architectures() -> tuple[str, ...]:
    """Every architecture that can be served, sorted."""
    return tuple(sorted(_FAMILIES))


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture. Raises ModelLoadError with the list of known ones."""
    if architecture not in _FAMILIES:
        raise ModelLoadError(f"architecture {architecture} is not supported; known are {', '.join(_FAMILIES)}")
    return _FAMILIES[architecture]
