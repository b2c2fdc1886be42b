"""Teams of real rank processes for engine tests, with a driver of rank 0."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.common.base.ids import new_incarnation
from kvferry.common.config.host import HostFacts
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.resolve import resolve_node
from kvferry.common.config.schema import ClusterConfig, LogConfig, NodeConfig, SecurityConfig
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.kv_transfer.interface import KvEvent
from kvferry.common.models.load import load_model
from kvferry.common.ranks.messages import RankSpec
from kvferry.common.ranks.runner import LeadRunner
from kvferry.common.ranks.team import RankTeam
from tests.support.engine_driver import EngineDriver

LOG = logging.getLogger("tests.ranks")
BLOCKS, BLOCK_SIZE, HOST_BLOCKS = 64, 4, 16


def spec_of(path: Path, size: int, dtype: str | None = None) -> RankSpec:
    """The common spec of ranks on a CPU with one thread each."""
    node = NodeConfig(tensor_parallel=size, threads=1, block_size=BLOCK_SIZE, max_model_len=200)
    settings = resolve_node(ClusterConfig(node=node), "prefill", HostFacts(1, 1 << 30))
    return RankSpec(
        size=size,
        model_path=str(path),
        dtype=dtype,
        settings=settings,
        limits=Limits(),
        timers=Timers(),
        log=LogConfig(),
        security=SecurityConfig(),
    )


class RecordingListener:
    """A TeamListener that records why the team was lost."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def on_rank_event(self, rank: int, event: KvEvent) -> None:
        raise AssertionError(f"rank {rank}: {event}")  # engine tests move no KV

    def on_team_lost(self, reason: str) -> None:
        self.lost.append(reason)


@contextmanager
def running_team(path: Path, size: int) -> Iterator[tuple[RankTeam, EngineDriver, RecordingListener]]:
    """A driver of rank 0 with real processes for the other ranks, which end with the block."""
    team = RankTeam(spec_of(path, size), LOG)
    listener = RecordingListener()
    try:
        team.start()
        loaded = load_model(path, device=CpuDevice(1), progress=False, collectives=team.collectives)
        driver = EngineDriver(
            loaded, blocks=BLOCKS, block_size=BLOCK_SIZE, host_blocks=HOST_BLOCKS, collectives=team.collectives
        )
        assert team.wait_loaded() > 0
        team.initialize(new_incarnation(), BLOCKS, CpuDevice(1), HOST_BLOCKS)
        team.set_listener(listener)
        driver.runner = LeadRunner(driver.runner, team.broadcast_step)  # type: ignore[assignment]
        yield team, driver, listener
    finally:
        team.close()
