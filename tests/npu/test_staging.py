"""Inputs of steps go to `npu:0` in one copy, and results come back when they are asked for, not before."""

from tests.npu.test_detection import in_a_process

STAGED = """
from array import array
import torch
from tests.npu.reference_kernels import bind_kernels
bind_kernels()
from kvferry.common.device.npu import open_npu
from kvferry.common.engine.batch import make_batch
from kvferry.common.engine.step_buffers import InputBuffers, OutputBuffer, StepShape
from kvferry.common.scheduling.step import ScheduledSequence
device = open_npu(0)
staging, landing = InputBuffers(device), OutputBuffer(device)
scheduled = [
    ScheduledSequence(1, array("I", [5, 6]), 127, (2, 1), True, 129),
    ScheduledSequence(2, array("I", [7]), 0, (3,), True, 1),
]
batch = make_batch(scheduled, 128, staging)
meta = batch.meta
on_device = [batch.token_ids, batch.positions, meta.slot_mapping, meta.lengths, meta.block_tables, batch.sampled_rows]
apart = all(tensor.device == device.torch_device and tensor.is_contiguous() for tensor in on_device)
staging.host_views(StepShape(3, 2, 2)).token_ids.fill(0)  # the host's side alone
fetched = [tensor.tolist() for tensor in landing.fetch(on_device)]
result = [apart, staging._host.is_pinned(), landing._host.is_pinned(), fetched]
"""


def test_a_step_is_sent_and_fetched():
    """Copies to the host are done late here: what is fetched before they are waited for would be wrong."""
    assert in_a_process(STAGED, HOST_ACL_LATE_D2H="1") == [
        True, True, True,
        [[5, 6, 7], [127, 128, 0], [383, 128, 384], [129, 1], [[2, 1], [3, 0]], [1, 2]],
    ]  # fmt: skip
