"""An unsplit node: both legs in one process, over one engine and one pool of blocks. Composition only.

The legs do not import one another; only here are they brought together.
"""

from kvferry.common.cluster.node_role import Leg
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.build import LegContext
from kvferry.common.node.process import run_node
from kvferry.decode_node.node import make_leg as make_decode_leg
from kvferry.prefill_node.node import make_leg as make_prefill_leg


def make_legs(context: LegContext) -> tuple[Leg, ...]:
    """The legs of an unsplit node: what the first computes goes on in the second."""
    decode = make_decode_leg(context)
    return make_prefill_leg(context, here=decode), decode


def run(config: ClusterConfig) -> int:
    """Serve until told to end; returns the exit code."""
    return run_node(config, "unsplit", make_legs)
