"""Makes the prefill leg. Composition only.

`run` serves a prefill node in this process.
"""

from kvferry.common.cluster.links import LinkTable
from kvferry.common.cluster.node_role import GoesOnHere
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.build import LegContext
from kvferry.common.node.process import run_node
from kvferry.common.protocol.messages import Hello
from kvferry.prefill_node.decode_links import DecodeLinks
from kvferry.prefill_node.role import PrefillLeg


def make_leg(context: LegContext, here: GoesOnHere | None = None) -> PrefillLeg:
    """The leg of a prefill node; `here` is the decode leg of the same process, if it has one."""
    hello = Hello(kind="prefill", name=context.name, compatibility=context.compatibility)
    return PrefillLeg(
        me=context.incarnation,
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
    return run_node(config, "prefill", lambda context: (make_leg(context),))
