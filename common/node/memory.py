"""Memory of the model, the KV cache and swap on each rank, and whether it fits. Arithmetic; allocates nothing.

The checks come before anything large is loaded or allocated.
"""

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.protocol import Limits
from kvferry.common.config.resolve import NodeSettings
from kvferry.common.device.base import Device
from kvferry.common.models.footprint import Footprint

_MIB = 1 << 20
_SWAP_SHARE = 0.1
"""Default swap space of a device with its own memory, as a share of the rank's KV cache."""


def check_memory_fits(footprint: Footprint, settings: NodeSettings, device: Device) -> None:
    """Raises ConfigError when the node does not fit into the device's free memory or into its configured share.

    Ranks in host memory share it, and are counted together. On a device with its own memory a KV cache without a
    configured size takes the rest, so it counts as 0.
    """
    in_host_memory = device.shares_host_memory
    ranks_here = settings.tensor_parallel if in_host_memory else 1
    cache = settings.kv_cache_bytes or (settings.kv_cache_bytes_on_cpu if in_host_memory else 0)
    cache = cache * ranks_here // settings.tensor_parallel
    weights = footprint.weights * ranks_here
    swap = settings.swap_bytes or 0 if in_host_memory else 0  # otherwise swap takes another memory than the cache
    computing = footprint.computing(settings.max_step_tokens, settings.max_running)
    model = weights + max(footprint.loading, computing) * ranks_here
    free = device.memory_info()[0]
    parts = f"weights {_mib(weights)}, KV cache {_mib(cache)}, " + (f"swap {_mib(swap)}, " if swap else "")
    parts += f"computing {_mib(model - weights)} MiB"
    cure = "lower node.kv_cache_bytes or node.max_step_tokens"
    needed = model + cache + swap
    if needed > free:
        raise ConfigError(
            f"node.kv_cache_bytes: this node needs {_mib(needed)} MiB ({parts}), but {_mib(free)} MiB are free "
            f"on {device.torch_device}; {cure}"
        )
    share = settings.model_memory_bytes
    if in_host_memory and share is not None and model > share:
        raise ConfigError(
            f"node.model_memory_bytes: this node needs {_mib(model)} MiB in addition to its KV cache ({parts}), but "
            f"may take {_mib(share)} MiB, the share of each node of this host; {cure}, or run fewer nodes"
        )


def kv_cache_bytes(settings: NodeSettings, device: Device, free_bytes: int) -> int:
    """Size of one rank's KV cache.

    As configured; by default a share of host memory for a device that computes in it, otherwise the device's free
    memory less the reserve.
    """
    num_bytes = settings.kv_cache_bytes
    if num_bytes is None and device.shares_host_memory:
        num_bytes = settings.kv_cache_bytes_on_cpu
    if num_bytes is None:
        return int(free_bytes * (1 - settings.device_reserve_share))
    return num_bytes // settings.tensor_parallel


def swap_bytes(settings: NodeSettings, device: Device, cache_bytes: int) -> int:
    """Size of one rank's swap space on the host.

    As configured; by default 0 for a device that computes in host memory, otherwise a tenth of the rank's KV cache, at
    most max_swap_bytes.
    """
    if settings.swap_bytes is not None:
        return settings.swap_bytes // settings.tensor_parallel
    if device.shares_host_memory:
        return 0
    return min(int(cache_bytes * _SWAP_SHARE), settings.max_swap_bytes // settings.tensor_parallel)


def check_piece_bytes(limits: Limits, layer_token_bytes: int) -> None:
    """Raises ConfigError when one token of one layer does not fit into a piece."""
    if limits.piece_max_bytes < layer_token_bytes:
        raise ConfigError(
            f"limits.piece_max_bytes: expected at least {layer_token_bytes}, one token of one layer of this model"
        )


def check_longest_request_fits(max_model_len: int, num_blocks: int, block_size: int, cache_bytes: int) -> None:
    """Raises ConfigError when the KV cache is too small for one request of the greatest length."""
    needed = -(-max_model_len // block_size) + 1
    if num_blocks < needed:
        raise ConfigError(
            f"node.kv_cache_bytes: {cache_bytes} bytes are {num_blocks} blocks of {block_size} tokens, but one "
            f"request of node.max_model_len {max_model_len} tokens needs {needed}; raise node.kv_cache_bytes or "
            f"lower node.max_model_len"
        )


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // _MIB)
