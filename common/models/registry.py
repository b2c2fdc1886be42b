"""Architecture names to model families. A new family adds one line here and one file beside it."""

from common.errors import ModelLoadError
from common.models import llama
from common.models.family import Family

_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
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
