"""Which model a configuration or an option means: a path that is there; the small real model where none is given."""

from pathlib import Path

import msgspec

from common.config.checks import model_name
from common.config.schema import ClusterConfig
from common.errors import ConfigError
from common.models.outside_check import check_model_files
from ops import model_store


def option_model(text: str | None) -> Path:
    """What --model names. ConfigError when it is not there, ModelLoadError when it cannot be a model; weights are not
    looked at."""
    if not text:
        return model_store.ensure_model()
    path = Path(text).expanduser()
    if not path.exists():
        raise ConfigError(f"--model: {path} is not there")
    check_model_files(path)
    return path


def with_model(config: ClusterConfig) -> ClusterConfig:
    """The configuration with model.path and model.name filled in. Fetches the small model if it is the one and not
    there. ConfigError when the path is not there."""
    name = model_name(config)
    if config.model.path:
        path = Path(config.model.path).expanduser().absolute()
    else:
        path, name = model_store.ensure_model(), name or model_store.MODEL_NAME
    if not path.exists():
        raise ConfigError(f"model.path: {path} is not there")
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(path), name=name))
