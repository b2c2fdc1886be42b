"""The tensor-parallel ranks of `kvferry bench engine --tp N`: a node's rank processes, led by the benchmark."""

import logging
from dataclasses import dataclass
from pathlib import Path

from kvferry.common.config.host import probe_host
from kvferry.common.config.resolve import resolve_node
from kvferry.common.config.schema import ClusterConfig, NodeConfig
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.models.load import DtypeName
from kvferry.common.ranks.messages import RankSpec
from kvferry.common.ranks.team import RankTeam


@dataclass(frozen=True, slots=True)
class Weights:
    """Type and quantization of the model's weights."""

    dtype: DtypeName | None
    """None: the checkpoint's type."""
    scheme: WeightScheme | None
    """None: not quantized."""


def make_team(path: Path, size: int, weights: Weights, threads: int, block_size: int) -> RankTeam:
    """A team on the CPU, not started; its ranks share the `threads`."""
    config = ClusterConfig(node=NodeConfig(tensor_parallel=size, threads=threads, block_size=block_size))
    spec = RankSpec(
        size=size,
        model_path=str(path),
        dtype=weights.dtype,
        scheme=weights.scheme,
        settings=resolve_node(config, "prefill", probe_host()),
        limits=config.limits,
        timers=config.timers,
        log=config.log,
        security=config.security,
    )
    return RankTeam(spec, logging.getLogger("kvferry.bench"))
