"""Which model a configuration means: a path that is there, and a name; the small real model where none is given."""

from pathlib import Path

import msgspec

from common.config.checks import model_name
from common.config.schema import ClusterConfig
from common.errors import ConfigError
from ops import model_store


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
