"""Makes the prefill role. Composition only.

`run` serves a prefill node in this process.
"""

from kvferry.common.cluster.links import LinkTable
from kvferry.common.cluster.node_role import LocalDecode
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.build import RoleContext
from kvferry.common.node.process import run_node
from kvferry.common.protocol.messages import Hello
from kvferry.prefill_node.decode_links import DecodeLinks
from kvferry.prefill_node.role import PrefillRole


def make_role(context: RoleContext, here: LocalDecode | None = None) -> PrefillRole:
    """The role of a prefill node; `here` is the decode role of the same process, if it has one."""
    hello = Hello(kind="prefill", name=context.name, compatibility=context.compatibility)
    return PrefillRole(
        self_id=context.incarnation,
        scheduler=context.scheduler,
        timers=context.timers,
        limits=context.limits,
        shape=context.shape,
        decodes=DecodeLinks(LinkTable(hello, context.timers), context.staging_host),
        num_blocks=context.num_blocks,
        block_size=context.block_size,
        here=here,
    )


def run(config: ClusterConfig) -> int:
    """Serve until told to end; returns the exit code."""
    return run_node(config, "prefill", lambda context: (make_role(context),))
