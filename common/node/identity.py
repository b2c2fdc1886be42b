"""What a node says of itself to other processes: its compatibility and its reachable endpoints. Pure."""

from kvferry.common.config.endpoints import parse_endpoint, with_key
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.protocol.messages import PROTOCOL_VERSION
from kvferry.common.protocol.model_info import Compatibility


def compatibility_of(model_identity: str, weights_version: str, cache: KvCache, tensor_parallel: int) -> Compatibility:
    """What must agree for KV to be transferred between two nodes."""
    tensors = ",".join(f"{spec.name}{list(spec.whole_shape(tensor_parallel))}" for spec in cache.specs)
    return Compatibility(
        protocol_version=PROTOCOL_VERSION,
        model=model_identity,
        kv_dtype=str(cache.specs[0].dtype).removeprefix("torch."),
        kv_layout=tensors.replace(" ", ""),
        block_size=cache.block_size,
        num_layers=cache.num_layers,
        tensor_parallel=tensor_parallel,
        weights=weights_version,
    )


def advertised_endpoint(bound: str, advertise: str) -> str:
    """The endpoint under which others reach `bound`: `advertise` if configured, with `bound`'s key.

    A port of * in `advertise` stands for the bound port.
    """
    if not advertise:
        return bound
    endpoint = parse_endpoint(bound)
    text = f"{advertise.removesuffix('*')}{endpoint.port}" if advertise.endswith(":*") else advertise
    return with_key(text, endpoint.key) if endpoint.key else text
