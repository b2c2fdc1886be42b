"""Which roles a node has, by their names: for the processes, the simulation and the tests alike. Pure composition."""

from collections.abc import Collection, Sequence

from kvferry.common.cluster.node_role import MakeRoles, NodeRole, RoleContext
from kvferry.common.protocol.messages import RoleName
from kvferry.decode_node.role import make_decode_role
from kvferry.prefill_node.role import make_prefill_role


def make_colocated_roles(context: RoleContext) -> Sequence[NodeRole]:
    """Both roles: the decode role adopts what the prefill role has computed."""
    decode = make_decode_role(context)
    return make_prefill_role(context, decode), decode


def roles_maker(names: Collection[RoleName]) -> MakeRoles:
    """What makes the roles of a node that has these."""
    if {"prefill", "decode"} <= set(names):
        return make_colocated_roles
    if "prefill" in names:
        return lambda context: (make_prefill_role(context),)
    return lambda context: (make_decode_role(context),)
