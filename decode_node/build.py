"""Makes the decode leg. Composition only."""

from kvferry.common.node.build import LegContext
from kvferry.decode_node.core.leg import DecodeLeg


def make_leg(context: LegContext) -> DecodeLeg:
    """The leg of a decode node."""
    return DecodeLeg(
        scheduler=context.scheduler,
        timers=context.timers,
        limits=context.limits,
        num_layers=context.shape.num_layers,
        clients=context.clients,
        num_staging_slots=context.num_staging_slots,
    )
