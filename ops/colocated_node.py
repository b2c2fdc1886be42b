"""A colocated node: both roles in one process, over one engine and one pool of blocks. Composition only.

The roles do not import one another; only here are they brought together.
"""

from kvferry.common.cluster.node_role import NodeRole
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.build import RoleContext
from kvferry.common.node.process import run_node
from kvferry.decode_node.node import make_role as make_decode_role
from kvferry.prefill_node.node import make_role as make_prefill_role


def make_roles(context: RoleContext) -> tuple[NodeRole, ...]:
    """The roles of a colocated node: what the first computes goes on in the second."""
    decode = make_decode_role(context)
    return make_prefill_role(context, here=decode), decode


def run(config: ClusterConfig) -> int:
    """Serve until told to end; returns the exit code."""
    return run_node(config, "colocated", make_roles)
