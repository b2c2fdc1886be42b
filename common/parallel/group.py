"""Rendezvous of the ranks of one node, through a store that rank 0 keeps on a free loopback port."""

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore as TCPStore  # type: ignore[attr-defined]

from kvferry.common.device.base import Device
from kvferry.common.parallel.collectives import GroupCollectives

_HOST = "127.0.0.1"


def open_store() -> TCPStore:
    """Open rank 0's store on a free port (`.port`). Does not wait for the other ranks."""
    with socket.create_server((_HOST, 0)) as server:
        # Without a given socket TCPStore listens on every interface.
        return TCPStore(
            _HOST,
            server.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(server.fileno()),
        )


def join_store(port: int, timeout: timedelta) -> TCPStore:
    """Connect another rank to rank 0's store. Raises RuntimeError when it is not reachable."""
    return TCPStore(_HOST, port, is_master=False, timeout=timeout)


def rendezvous(collectives: GroupCollectives, device: Device, store: TCPStore, timeout: timedelta) -> None:
    """Wait until all ranks have joined, and connect `collectives`. `timeout` also bounds each later operation."""
    shard = collectives.shard
    collectives.connect(device.group(store, shard.rank, shard.size, timeout))
