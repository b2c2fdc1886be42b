"""How much memory KV takes on each rank of a node, on the device and on the host. Arithmetic; allocates nothing."""

from kvferry.common.config.protocol import Limits
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.device.base import Device
from kvferry.common.errors import ConfigError

_SWAP_SHARE = 0.1
"""Of the KV cache, where swap_bytes is worked out."""


def kv_cache_bytes(settings: NodeSettings, device: Device, free_bytes: int) -> int:
    """As configured; else a share of the host's memory on a CPU, elsewhere what is free now but for the reserve."""
    num_bytes = settings.kv_cache_bytes
    if num_bytes is None and device.name == "cpu":
        num_bytes = settings.kv_cache_bytes_on_cpu
    if num_bytes is None:
        return int(free_bytes * (1 - settings.device_reserve_share))
    return num_bytes // settings.tensor_parallel


def swap_bytes(settings: NodeSettings, device: Device, cache_bytes: int) -> int:
    """As configured; else nothing on a CPU, elsewhere a tenth of the rank's cache, within what the host can spare."""
    if settings.swap_bytes is not None:
        return settings.swap_bytes // settings.tensor_parallel
    if device.name == "cpu":
        return 0
    return min(int(cache_bytes * _SWAP_SHARE), settings.swap_bytes_most // settings.tensor_parallel)


def check_piece_bytes(limits: Limits, layer_token_bytes: int) -> None:
    """ConfigError when not even one token of one layer would fit into a piece."""
    if limits.piece_max_bytes < layer_token_bytes:
        raise ConfigError(
            f"limits.piece_max_bytes: expected at least {layer_token_bytes}, one token of one layer of this model"
        )
