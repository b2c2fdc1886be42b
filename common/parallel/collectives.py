"""What ranks exchange while they compute: sums, and parts laid side by side. Every rank calls the same, in one order.

A sum has the same bits on every rank, so what is chosen by it (experts, say) is the same everywhere. It has not the
bits of the undivided model's sum: the parts are added in another order.
"""

from typing import Protocol

import torch
from torch import Tensor

from kvferry.common.base.errors import InvariantError
from kvferry.common.device.base import Group
from kvferry.common.parallel.shard import WHOLE, Shard


class Collectives(Protocol):
    """The exchange of one rank with the others of its node."""

    @property
    def shard(self) -> Shard:
        """Which rank this is."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, of the same shape; may reuse the memory of `part`."""
        ...

    def side_by_side(self, part: Tensor) -> Tensor:
        """[n, c] on each rank -> [n, size * c], rank 0's columns first."""
        ...


class Alone:
    """Implements Collectives where there is one rank."""

    shard = WHOLE

    def sum(self, part: Tensor) -> Tensor:
        """The part itself."""
        return part

    def side_by_side(self, part: Tensor) -> Tensor:
        """The part itself."""
        return part


ALONE = Alone()


class GroupCollectives:
    """Implements Collectives over a process group. A model may be made with it before the ranks have met."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._group: Group | None = None

    @property
    def shard(self) -> Shard:
        """Which rank this is."""
        return self._shard

    def connect(self, group: Group) -> None:
        """The ranks have met."""
        if group.size() != self._shard.size or group.rank() != self._shard.rank:
            raise InvariantError(f"a group of {group.size()} for {self._shard}")
        self._group = group

    def disconnect(self) -> None:
        """Nothing is computed any more: the group's connections are closed."""
        self._group = None

    def sum(self, part: Tensor) -> Tensor:
        """In place where the part is contiguous. RuntimeError when a rank is gone or too late."""
        part = part.contiguous()
        self._connected().allreduce([part]).wait()
        return part

    def side_by_side(self, part: Tensor) -> Tensor:
        """Every rank gets all: not every library that moves tensors between devices has a gathering to one."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._shard.size)]
        self._connected().allgather([parts], [part]).wait()
        return torch.cat(parts, dim=1)

    def _connected(self) -> Group:
        if self._group is None:
            raise InvariantError("the ranks have not met yet")
        return self._group
