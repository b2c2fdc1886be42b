"""How the ranks of one node find one another: a small store on a free port of loopback, kept by rank 0."""

from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from common.device.base import Device
from common.parallel.collectives import GroupCollectives

_HOST = "127.0.0.1"


def open_store() -> TCPStore:
    """Rank 0's: takes a free port (`.port`) and waits for nobody."""
    return TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)


def join_store(port: int, timeout: timedelta) -> TCPStore:
    """Another rank's. RuntimeError when rank 0 is not there."""
    return TCPStore(_HOST, port, is_master=False, timeout=timeout)


def meet(collectives: GroupCollectives, device: Device, store: TCPStore, timeout: timedelta) -> None:
    """Wait until all ranks have come here. `timeout` holds for that and for each later operation between them."""
    shard = collectives.shard
    collectives.connect(device.group(store, shard.rank, shard.size, timeout))
