"""The group of a tensor-parallel node's ranks, made of the real torch_npu's HCCL class. It exchanges nothing here:
behind the stand-ins there is no HCCL, so what is checked is how it is made and that it is one of torch's groups."""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo

from kvferry.common.parallel.collectives import GroupCollectives
from kvferry.common.parallel.group import open_store, rendezvous
from kvferry.common.parallel.shard import Shard


def test_ranks_on_npus_meet_by_hccl(torch_npu):
    from kvferry.common.device.npu import open_npu

    device, collectives = open_npu(1), GroupCollectives(Shard(0, 1))
    timeout = timedelta(seconds=2000)
    store = open_store()
    rendezvous(collectives, device, store, timeout)  # which compares rank and size
    group: Any = device.group(store, 0, 1, timeout)
    assert type(group) is torch_npu._C._distributed_c10d.ProcessGroupHCCL
    assert group.options._timeout == timeout
    # The calls that a rank makes are of the class that it has in common with gloo's group, on which they are tested.
    common = torch._C._distributed_c10d.Backend
    assert isinstance(group, common)
    assert issubclass(ProcessGroupGloo, common)
