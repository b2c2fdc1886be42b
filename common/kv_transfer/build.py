"""Makes a mover out of a node's settings. Composition only."""

from collections.abc import Callable

from kvferry.common.base.ids import Incarnation
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.kv_transfer.interface import BlockBytes, Post
from kvferry.common.kv_transfer.shm import ShmSlotWriter, ShmSlotMemory
from kvferry.common.kv_transfer.zmq_backend import ZmqKvMover
from kvferry.common.transport.context import TransportContext


def make_mover(
    context: TransportContext,
    own: Incarnation,
    bind: str,
    cache: BlockBytes,
    settings: NodeSettings,
    limits: Limits,
    timers: Timers,
    activate: Callable[[], None],
    post: Post,
) -> ZmqKvMover:
    """The mover of one rank. `activate` binds its thread to the device."""
    return ZmqKvMover(
        context,
        own,
        bind,
        cache,
        limits,
        post,
        allow_remote=settings.allow_remote,
        checksum=settings.checksum,
        activate=activate,
        timers=timers,
        memory=ShmSlotMemory(settings.staging_slots, settings.staging_slot_bytes) if settings.lends_slots else None,
        reach=ShmSlotWriter(own) if settings.uses_shm else None,
    )
