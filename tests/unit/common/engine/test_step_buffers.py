"""Step inputs do not overlap, have equal addresses for equal shapes, and arrive on the device unchanged."""

from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.common.device.cpu import CpuDevice
from kvferry.common.engine.batch import make_batch
from kvferry.common.engine.sampler import Sampler
from kvferry.common.engine.step_buffers import HostInputs, InputBuffers, OutputBuffer, StepInputs, StepShape
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.step import NewSequence, ScheduledSequence

SHAPES = [StepShape(1, 1, 1), StepShape(7, 3, 5), StepShape(513, 2, 40), StepShape(3, 3, 1)]


def tensors(inputs: StepInputs) -> list[torch.Tensor]:
    return [getattr(inputs, field.name) for field in fields(inputs)]


def arrays(inputs: HostInputs) -> list["np.ndarray[Any, Any]"]:
    return [getattr(inputs, field.name) for field in fields(inputs)]


@pytest.mark.parametrize("shape", SHAPES)
def test_inputs_are_aligned_and_do_not_overlap(shape: StepShape) -> None:
    buffers = InputBuffers(CpuDevice(1))
    on_host = arrays(buffers.host_views(shape))
    for number, array_ in enumerate(on_host):
        array_.fill(number)
    sent = tensors(buffers.send(shape))
    for number, tensor in enumerate(sent):
        assert (tensor == number).all()
        assert (tensor.data_ptr() - sent[0].data_ptr()) % 512 == 0
    assert [tensor.shape for tensor in sent] == [array_.shape for array_ in on_host]


def test_equal_shapes_have_equal_addresses_after_another_shape() -> None:
    buffers = InputBuffers(CpuDevice(1))
    large, small = StepShape(100, 4, 9), StepShape(4, 4, 9)

    def addresses() -> list[int]:
        buffers.host_views(large)
        return [tensor.data_ptr() for tensor in tensors(buffers.send(large))]

    first = addresses()
    buffers.host_views(small)
    buffers.send(small)
    assert addresses() == first


def test_addresses_do_not_change_for_reserved_shapes() -> None:
    buffers = InputBuffers(CpuDevice(1))
    buffers.reserve(SHAPES)
    addresses = {tensors(buffers.send(shape))[0].data_ptr() for shape in sorted(SHAPES, key=lambda shape: shape.tokens)}
    assert len(addresses) == 1


def test_a_batch_arrives_on_the_device_unchanged() -> None:
    buffers = InputBuffers(CpuDevice(1))
    buffers.host_views(StepShape(64, 8, 8)).block_tables.fill(77)  # left over from an earlier step
    scheduled = [
        ScheduledSequence(1, array("I", [5, 6, 7]), 6, (3, 1, 2), True, 9),
        ScheduledSequence(2, array("I", [8]), 0, (4,), False),
        ScheduledSequence(3, array("I", [9]), 3, (7,), True, 4),
    ]
    batch = make_batch(scheduled, 4, buffers)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [6, 7, 8, 0, 3]
    assert batch.meta.slot_mapping.tolist() == [6, 7, 8, 16, 31]
    assert batch.meta.query_start_loc == (0, 3, 4, 5)
    assert list(batch.meta.seq_lens) == batch.meta.lengths.tolist() == [9, 1, 4]
    assert batch.meta.block_tables.tolist() == [[3, 1, 2], [4, 0, 0], [7, 0, 0]]
    assert batch.sampled_rows.tolist() == [2, 4]
    assert (batch.sampled_ids, batch.sampled_positions) == ((1, 3), (9, 4))


def test_cpu_tensors_are_not_copied() -> None:
    tensor = torch.ones(3)
    assert OutputBuffer(CpuDevice(1)).fetch([tensor])[0] is tensor


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [("ggg", 0), ("grg", 1), ("gpr", 2), ("rrr", 3), ("ppp", 3)],
)
def test_only_random_or_penalised_rows_are_copied_to_the_host(kinds: str, wanted: int) -> None:
    """Greedy (g), random (r) and penalised (p) rows get the same tokens as each alone."""
    params = {
        "g": SamplingParams(max_new_tokens=1),
        "r": SamplingParams(max_new_tokens=1, do_sample=True, temperature=1.5, seed=3),
        "p": SamplingParams(max_new_tokens=1, repetition_penalty=1.7),
    }
    fetched: list[tuple[int, ...]] = []

    def fetch(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        fetched.extend(tuple(tensor.shape) for tensor in tensors if tensor.dim() == 2)
        return [tensor.clone() for tensor in tensors]

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    ids = [NewSequence(row, array("I", range(row, 50, 2)), params[kind]) for row, kind in enumerate(kinds)]
    together = Sampler(50, fetch)
    for new in ids:
        together.add(new.seq_id, new.token_ids, new.sampling)
    got = together.sample([0, 1, 2], [9, 9, 9], logits.clone()).sampled
    assert fetched == [(wanted, 50)] * bool(wanted)
    for new in ids:
        alone = Sampler(50)
        alone.add(new.seq_id, new.token_ids, new.sampling)
        assert alone.sample([new.seq_id], [9], logits[new.seq_id : new.seq_id + 1].clone()).sampled == {
            new.seq_id: got[new.seq_id]
        }
