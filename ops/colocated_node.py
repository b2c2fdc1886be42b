"""A colocated node: both roles in one process, over one engine and one block pool. Composition only."""

from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.process import run_node
from kvferry.ops.roles import make_colocated_roles


def run(config: ClusterConfig) -> int:
    """Serve until a stop signal. Returns the exit code."""
    return run_node(config, "colocated", make_colocated_roles)
