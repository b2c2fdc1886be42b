"""How the ranks of one node find one another: a small store on a free port of loopback, kept by rank 0."""

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

from kvferry.common.device.base import Device
from kvferry.common.parallel.collectives import GroupCollectives

_HOST = "127.0.0.1"


def open_store() -> TCPStore:
    """Rank 0's: takes a free port (`.port`) and waits for nobody."""
    with socket.create_server((_HOST, 0)) as server:
        # By itself it would listen on every interface.
        return TCPStore(
            _HOST,
            server.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(server.fileno()),
        )


def join_store(port: int, timeout: timedelta) -> TCPStore:
    """Another rank's. RuntimeError when rank 0 is not there."""
    return TCPStore(_HOST, port, is_master=False, timeout=timeout)


def meet(collectives: GroupCollectives, device: Device, store: TCPStore, timeout: timedelta) -> None:
    """Wait until all ranks have come here. `timeout` holds for that and for each later operation between them."""
    shard = collectives.shard
    collectives.connect(device.group(store, shard.rank, shard.size, timeout))
