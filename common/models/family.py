"""What a model family brings: a class that computes, and a reader of its settings. One file a family has both."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.common.models.causal_lm import CausalLM
from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.settings import Settings


@dataclass(frozen=True, slots=True)
class HfSettings:
    """What a HuggingFace directory says about its model."""

    model: Settings
    """config.json; what the family's reader does not ask for is refused."""
    generation: Mapping[str, object]
    """generation_config.json, empty when there is none."""


@dataclass(frozen=True, slots=True)
class Family:
    """One entry of the registry."""

    model: type[CausalLM]
    read_config: Callable[[HfSettings], TransformerConfig]
    """Raises ModelLoadError, naming the setting, for what is wrong or not supported."""
