"""Makes the decode role. Composition only.

`run` serves a decode node in this process.
"""

from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.build import RoleContext
from kvferry.common.node.process import run_node
from kvferry.decode_node.role import DecodeRole


def make_role(context: RoleContext) -> DecodeRole:
    """The role of a decode node."""
    return DecodeRole(
        scheduler=context.scheduler,
        timers=context.timers,
        limits=context.limits,
        num_layers=context.shape.num_layers,
        clients=context.clients,
        num_staging_slots=context.num_staging_slots,
    )


def run(config: ClusterConfig) -> int:
    """Serve until told to end; returns the exit code."""
    return run_node(config, "decode", lambda context: (make_role(context),))
