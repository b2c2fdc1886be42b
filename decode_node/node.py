"""A decode node as a process. Composition only."""

from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.process import run_node
from kvferry.decode_node.role import make_decode_role


def run(config: ClusterConfig) -> int:
    """Serve until asked to stop. Returns the exit code."""
    return run_node(config, "decode", lambda context: (make_decode_role(context),))
