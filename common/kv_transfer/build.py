"""Builds the mover of one rank from its node's settings. Composition only."""

from collections.abc import Callable

from kvferry.common.base.ids import Incarnation
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.kv_transfer.interface import BlockBytes, Post
from kvferry.common.kv_transfer.registry import num_staging_slots, staging_transport
from kvferry.common.kv_transfer.zmq_backend import ZmqKvMover
from kvferry.common.transport.context import TransportContext


def make_mover(
    context: TransportContext,
    self_id: Incarnation,
    bind: str,
    cache: BlockBytes,
    settings: NodeSettings,
    limits: Limits,
    timers: Timers,
    activate: Callable[[], None],
    post: Post,
) -> ZmqKvMover:
    """`activate` binds the mover's thread to the device of `cache`."""
    staging, num_slots = staging_transport(settings), num_staging_slots(settings)
    return ZmqKvMover(
        context,
        self_id,
        bind,
        cache,
        limits,
        post,
        allow_remote=settings.allow_remote,
        checksum=settings.checksum,
        activate=activate,
        timers=timers,
        memory=staging.make_memory(num_slots, settings.staging_slot_bytes) if staging and num_slots else None,
        writer=staging.make_writer(self_id) if staging else None,
    )
