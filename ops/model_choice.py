"""Which model a configuration or an option means: a path that is there; the small real model where none is given."""

from pathlib import Path

import msgspec

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.checks import model_name
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.models.checkpoint_precheck import check_model_files
from kvferry.ops import model_store


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


def served_name(config: ClusterConfig) -> str:
    """What the configured model is called in URLs: the same for router and nodes, whether its files are here or not."""
    if config.model.name or not config.model.path:
        return config.model.name or model_store.MODEL_NAME
    return model_name(_with(config, path=str(_absolute(config.model.path))))


def with_model(config: ClusterConfig) -> ClusterConfig:
    """The configuration with model.path and model.name filled in. Fetches the small model if it is the one and not
    there. ConfigError when the path is not there."""
    path = _absolute(config.model.path) if config.model.path else model_store.ensure_model()
    if not path.exists():
        raise ConfigError(f"model.path: {path} is not there")
    return _with(config, path=str(path), name=served_name(config))


def _absolute(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _with(config: ClusterConfig, **changes: str) -> ClusterConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **changes))
