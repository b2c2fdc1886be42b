"""`run` serves a prefill node in this process."""

from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.process import run_node
from kvferry.prefill_node.build import make_leg


def run(config: ClusterConfig) -> int:
    """Serve until told to end; returns the exit code."""
    return run_node(config, "prefill", lambda context: (make_leg(context),))
