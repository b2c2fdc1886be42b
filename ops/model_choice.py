"""Resolves the model that a configuration or an option names; the default is the small real model."""

from pathlib import Path

import msgspec

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.checks import model_name
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.models.checkpoint_precheck import check_model_files
from kvferry.ops import model_store


def option_model(text: str | None) -> Path:
    """The path that --model names. Raises ConfigError if it does not exist, ModelLoadError if its files cannot be a
    model; does not read weights."""
    if not text:
        return model_store.ensure_model()
    path = Path(text).expanduser()
    if not path.exists():
        raise ConfigError(f"--model: {path} does not exist")
    check_model_files(path)
    return path


def served_name(config: ClusterConfig) -> str:
    """The configured model's name in URLs: the same on every host, whether the files exist there or not."""
    if config.model.name or not config.model.path:
        return config.model.name or model_store.MODEL_NAME
    return model_name(_with(config, path=str(_absolute(config.model.path))))


def with_model(config: ClusterConfig) -> ClusterConfig:
    """The configuration with model.path and model.name filled in; fetches the small model if needed. Raises ConfigError
    if the path does not exist."""
    path = _absolute(config.model.path) if config.model.path else model_store.ensure_model()
    if not path.exists():
        raise ConfigError(f"model.path: {path} does not exist")
    return _with(config, path=str(path), name=served_name(config))


def _absolute(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _with(config: ClusterConfig, **changes: str) -> ClusterConfig:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **changes))
