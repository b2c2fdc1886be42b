"""The collective operations of a sharded model. Every rank must call the same operations in the same order.

An all-reduce has the same bits on every rank, so decisions based on it (experts, for example) agree everywhere. It
differs in the last bits from the unsharded model's sum, because the parts are added in another order.
"""

from typing import Protocol

import torch
from torch import Tensor

from kvferry.common.base.errors import InvariantError
from kvferry.common.device.base import Group
from kvferry.common.parallel.shard import WHOLE, Shard


class Collectives(Protocol):
    """One rank's operations with the other ranks of its node."""

    @property
    def shard(self) -> Shard:
        """The calling rank."""
        ...

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, of the same shape; may reuse the memory of `part`."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Concatenate along columns: [n, c] on each rank -> [n, size * c], rank 0's columns first."""
        ...


class SingleRank:
    """Implements Collectives for an unsharded model: both operations return the part itself."""

    shard = WHOLE

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        return part


ALONE = SingleRank()


class GroupCollectives:
    """Implements Collectives over a process group. A model may be built with it before `connect`."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._group: Group | None = None

    @property
    def shard(self) -> Shard:
        return self._shard

    def connect(self, group: Group) -> None:
        """Use `group`, which all ranks have joined. Raises InvariantError when it does not match the shard."""
        if group.size() != self._shard.size or group.rank() != self._shard.rank:
            raise InvariantError(f"a group of {group.size()} for {self._shard}")
        self._group = group

    def disconnect(self) -> None:
        """Drop the group, which closes its connections. The caller must have ended all computing."""
        self._group = None

    def all_reduce(self, part: Tensor) -> Tensor:
        """In place if the part is contiguous. Raises RuntimeError when a rank is lost or times out."""
        part = part.contiguous()
        self._connected().allreduce([part]).wait()
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        # To every rank: not every communication library of a device can gather to one rank.
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._shard.size)]
        self._connected().allgather([parts], [part]).wait()
        return torch.cat(parts, dim=1)

    def _connected(self) -> Group:
        if self._group is None:
            raise InvariantError("a collective operation before the ranks have connected")
        return self._group
