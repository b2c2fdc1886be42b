"""`run` serves a decode node in this process."""

from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.process import run_node
from kvferry.decode_node.build import make_leg


def run(config: ClusterConfig) -> int:
    """Serve until told to end; returns the exit code."""
    return run_node(config, "decode", lambda context: (make_leg(context),))
