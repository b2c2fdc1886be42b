"""A tensor-parallel engine with threads for ranks, over a real process group: tests the arithmetic, not processes."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvferry.common.device.base import Device
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.engine.runner import ModelRunner
from kvferry.common.models.load import LoadedModel, load_model
from kvferry.common.parallel.collectives import GroupCollectives
from kvferry.common.parallel.group import join_store, open_store, rendezvous
from kvferry.common.parallel.shard import Shard
from kvferry.common.ranks.runner import LeadRunner, SilentSampler
from kvferry.common.scheduling.step import StepBatch
from tests.support.engine_driver import EngineDriver

TIMEOUT = timedelta(seconds=60)


def load_ranks(path: Path, size: int, device: Device | None = None, **options: Any) -> list[LoadedModel]:
    """Load the model's parts and connect their collectives."""
    device = device or CpuDevice(1)
    collectives = [GroupCollectives(Shard(rank, size)) for rank in range(size)]
    loaded = [load_model(path, device=device, progress=False, collectives=own, **options) for own in collectives]
    store = open_store()

    def join(own: GroupCollectives) -> None:
        rendezvous(own, device, store if own.shard.is_first else join_store(store.port, TIMEOUT), TIMEOUT)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(join, collectives))
    return loaded


@contextmanager
def rank_driver(
    ranks: list[LoadedModel], device: Device | None = None, blocks: int = 256, block_size: int = 4
) -> Iterator[EngineDriver]:
    """A driver of rank 0, with a thread for each other rank that ends with the block."""
    device = device or CpuDevice(1)
    first, *others = ranks
    queues: list[queue.SimpleQueue[StepBatch | None]] = [queue.SimpleQueue() for _ in others]
    driver = EngineDriver(first, device, blocks, block_size)

    def follow(loaded: LoadedModel, batches: "queue.SimpleQueue[StepBatch | None]") -> None:
        device.activate_thread()
        cache = KvCache(device, loaded.kv_specs, loaded.config.num_layers, blocks, block_size)
        runner = ModelRunner(loaded.model, cache, SilentSampler(), device)
        while (batch := batches.get()) is not None:
            assert runner.execute(batch).sampled == {}

    def broadcast(batch: StepBatch) -> None:
        for batches in queues:
            batches.put(batch)

    driver.runner = LeadRunner(driver.runner, broadcast)  # type: ignore[assignment]
    threads = [threading.Thread(target=follow, args=pair, daemon=True) for pair in zip(others, queues, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield driver
    finally:
        for batches in queues:
            batches.put(None)
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a rank did not end"
