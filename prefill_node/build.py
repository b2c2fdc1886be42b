"""Makes the prefill leg. Composition only."""

from kvferry.common.node.build import LegContext
from kvferry.common.protocol.messages import Hello
from kvferry.common.state.leg import GoesOnHere
from kvferry.common.state.links import LinkTable
from kvferry.prefill_node.core.decode_links import DecodeLinks
from kvferry.prefill_node.core.leg import PrefillLeg


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
