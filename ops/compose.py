"""The one place where all parts meet: from a configuration to a running process. Each is imported when asked for."""

from typing import TYPE_CHECKING

from kvferry.common.config.schema import ClusterConfig, NodeKind

if TYPE_CHECKING:
    from kvferry.router.http.shell import AsgiShell


def run_role(config: ClusterConfig, role: NodeKind) -> int:
    """Serve a node of this role until told to end; the exit code."""
    match role:
        case "prefill":
            from kvferry.prefill_node.node import run
        case "decode":
            from kvferry.decode_node.node import run
        case "colocated":
            from kvferry.ops.colocated_node import run
    return run(config)


def create_router_app(config: ClusterConfig) -> "AsgiShell":
    """The ASGI application of one gunicorn worker."""
    from importlib.metadata import version

    from kvferry.router.compose import build_app

    return build_app(config, version=version("kvferry"))
