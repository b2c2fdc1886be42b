"""A prefill node as a process. Composition only."""

from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.process import run_node
from kvferry.prefill_node.role import make_prefill_role


def run(config: ClusterConfig) -> int:
    """Serve until asked to stop. Returns the exit code."""
    return run_node(config, "prefill", lambda context: (make_prefill_role(context),))
