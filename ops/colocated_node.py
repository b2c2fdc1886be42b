"""Composes a colocated node: both roles in one process, with one engine and one block pool.

The roles' packages must not import each other, so they are put together here, in ops.
"""

from kvferry.common.cluster.node_role import NodeRole
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.build import RoleContext
from kvferry.common.node.process import run_node
from kvferry.decode_node.node import make_role as make_decode_role
from kvferry.prefill_node.node import make_role as make_prefill_role


def make_roles(context: RoleContext) -> tuple[NodeRole, ...]:
    """The prefill role, which hands requests over inside the process, and the decode role."""
    decode = make_decode_role(context)
    return make_prefill_role(context, here=decode), decode


def run(config: ClusterConfig) -> int:
    """Serve until a stop signal; returns the exit code."""
    return run_node(config, "colocated", make_roles)
