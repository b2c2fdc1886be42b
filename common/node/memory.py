"""Whether a node's model and cache fit, decided before anything large is loaded: what is needed, what there is.

How much memory KV takes on each rank of a node, on the device and on the host. Arithmetic; allocates nothing.
"""

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.protocol import Limits
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.device.base import Device
from kvferry.common.models.footprint import Footprint

_MIB = 1 << 20


def check_memory_fits(footprint: Footprint, settings: NodeSettings, device: Device) -> None:
    """ConfigError where the node would not fit: its part, with the other ranks' where they share its memory.

    Without a configured cache an accelerator's cache takes what is left, so there it counts as nothing.
    """
    on_host = device.shares_host_memory
    # Ranks in host memory share it; on accelerators each has a device of its own.
    parts_here = settings.tensor_parallel if on_host else 1
    cache = settings.kv_cache_bytes or (settings.kv_cache_bytes_on_cpu if on_host else 0)
    cache = cache * parts_here // settings.tensor_parallel
    weights = footprint.weights * parts_here
    swap = settings.swap_bytes or 0 if on_host else 0  # elsewhere it is other memory than the cache's
    computing = footprint.computing(settings.max_step_tokens, settings.max_running)
    model = weights + max(footprint.loading, computing) * parts_here
    free = device.memory_info()[0]
    parts = f"weights {_mib(weights)}, KV cache {_mib(cache)}, " + (f"swap {_mib(swap)}, " if swap else "")
    parts += f"computing {_mib(model - weights)} MiB"
    advice = "less is needed with a smaller node.kv_cache_bytes or node.max_step_tokens"
    needed = model + cache + swap
    if needed > free:
        raise ConfigError(
            f"node.kv_cache_bytes: this node needs {_mib(needed)} MiB ({parts}), but {_mib(free)} MiB are free "
            f"on {device.torch_device}; {advice}"
        )
    share = settings.model_memory_bytes
    if on_host and share is not None and model > share:
        raise ConfigError(
            f"node.model_memory_bytes: this node needs {_mib(model)} MiB beside its cache ({parts}), but may take "
            f"{_mib(share)} MiB: what the nodes of this host have each; {advice}, or fewer nodes"
        )


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // _MIB)


_SWAP_SHARE = 0.1
"""Of the KV cache, where swap_bytes is worked out."""


def kv_cache_bytes(settings: NodeSettings, device: Device, free_bytes: int) -> int:
    """As configured; else a share of the host's memory on a CPU, elsewhere what is free now but for the reserve."""
    num_bytes = settings.kv_cache_bytes
    if num_bytes is None and device.shares_host_memory:
        num_bytes = settings.kv_cache_bytes_on_cpu
    if num_bytes is None:
        return int(free_bytes * (1 - settings.device_reserve_share))
    return num_bytes // settings.tensor_parallel


def swap_bytes(settings: NodeSettings, device: Device, cache_bytes: int) -> int:
    """As configured; else nothing on a CPU, elsewhere a tenth of the rank's cache, within what the host can spare."""
    if settings.swap_bytes is not None:
        return settings.swap_bytes // settings.tensor_parallel
    if device.shares_host_memory:
        return 0
    return min(int(cache_bytes * _SWAP_SHARE), settings.max_swap_bytes // settings.tensor_parallel)


def check_piece_bytes(limits: Limits, layer_token_bytes: int) -> None:
    """ConfigError when not even one token of one layer would fit into a piece."""
    if limits.piece_max_bytes < layer_token_bytes:
        raise ConfigError(
            f"limits.piece_max_bytes: expected at least {layer_token_bytes}, one token of one layer of this model"
        )
