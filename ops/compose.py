"""The one place where all parts meet: from a configuration to a running process. Each is imported when asked for."""

from typing import TYPE_CHECKING

from common.config.schema import ClusterConfig

if TYPE_CHECKING:
    from router.http.shell import AsgiShell


def run_prefill(config: ClusterConfig) -> int:
    """Serve a prefill node until told to end; the exit code."""
    from prefill_node.main import run

    return run(config)


def run_decode(config: ClusterConfig) -> int:
    """Serve a decode node until told to end; the exit code."""
    from decode_node.main import run

    return run(config)


def create_router_app(config: ClusterConfig) -> "AsgiShell":
    """The ASGI application of one gunicorn worker."""
    from importlib.metadata import version

    from router.compose import build_app

    return build_app(config, version=version("kvferry"))
