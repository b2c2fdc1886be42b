"""Reads config.json and generation_config.json of a HuggingFace directory, each family's by its own reader."""

from pathlib import Path

from kvferry.common.models.architectures import architecture_of
from kvferry.common.models.config import ModelConfig
from kvferry.common.models.family import HfSettings
from kvferry.common.models.hf_settings import HARMLESS, HARMLESS_PREFIXES
from kvferry.common.models.json_file import read_json
from kvferry.common.models.registry import family
from kvferry.common.models.settings import Settings


def read_hf_config(directory: Path) -> ModelConfig:
    """The configuration of a HuggingFace directory. Raises ModelLoadError, naming the setting.

    A setting that the family's reader did not ask for, and that is not known as harmless, is refused.
    """
    settings = Settings(read_json(directory / "config.json"), "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    config = family(architecture_of(settings)).read_config(HfSettings(settings, generation))
    settings.refuse_rest(HARMLESS, HARMLESS_PREFIXES)
    return config
