"""What roles are made of in tests of the pure cores, without a node around them."""

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.clients import ClientTable
from kvferry.common.cluster.node_role import RoleContext
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.model_info import Compatibility
from kvferry.common.scheduling.scheduler import Scheduler

LAYERS = 2
SELF_ID = Incarnation("1" * 32)
COMPATIBILITY = Compatibility(
    protocol_version=2, model="m", kv_dtype="f", kv_layout="l", block_size=4, num_layers=LAYERS
)


def role_context(
    scheduler: Scheduler,
    clients: ClientTable | None = None,
    *,
    timers: Timers | None = None,
    limits: Limits | None = None,
    num_staging_slots: int = 0,
    staging_host: str = "",
) -> RoleContext:
    """Two layers of 1 KiB a token; the rest as in a real node."""
    timers, load = timers or Timers(), scheduler.load()
    return RoleContext(
        self_id=SELF_ID,
        name="p",
        compatibility=COMPATIBILITY,
        scheduler=scheduler,
        timers=timers,
        limits=limits or Limits(),
        shape=KvShape(LAYERS, 1024),
        clients=clients or ClientTable(timers),
        num_blocks=load.total_blocks,
        block_size=load.block_size,
        num_staging_slots=num_staging_slots,
        staging_host=staging_host,
    )
