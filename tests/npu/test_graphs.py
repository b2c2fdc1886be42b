"""Decode steps recorded through the real `torch_npu.npu.graph`: what is recorded, and what a replay gives the kernels.

The runtime behind the stand-ins records nothing. So its own few calls are noted here, and what is above them is real:
the recording mode, which keeps attention calls apart, and their update with the lengths of a replay. Tensors are on the
CPU, for there are no kernels elsewhere; the recording mode copies such, where it only refers to those of an NPU.
"""

import inspect
from array import array
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from kvferry.common.device.base import Device
from kvferry.common.device.graphs import AcceleratorGraphs
from kvferry.common.device.npu_graphs import NpuGraphApi, NpuGraphHandle, NpuRecorder
from kvferry.common.device.npu_ops import NpuFeatures, NpuOps, causal_mask
from kvferry.common.engine.decode_graphs import DecodeGraphs, GraphSize
from kvferry.common.engine.kv_cache import KvCache
from kvferry.common.models.decoder import DecoderModel
from kvferry.common.models.weights import TrackedWeights
from kvferry.common.scheduling.step import ScheduledSequence
from tests.npu.test_model import BLOCK, CONFIG, CPU, RandomWeights
from tests.support.paged_device import PagedDevice


def names(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_parameters_written_down_are_those_of_the_real_calls(torch_npu):
    npu = torch_npu.npu
    assert set(names(NpuGraphApi.graph)) <= set(names(npu.graph))
    assert names(npu.graph)[0] == "npu_graph"
    assert names(NpuGraphHandle.update) == names(npu.NPUGraph.update) == ["cpu_update_input"]
    assert names(npu.NPUGraph.replay) == []
    assert npu.graph_pool_handle() != npu.graph_pool_handle(), "each recorder has memory of its own"


@pytest.fixture
def runtime(torch_npu, monkeypatch):
    """What reaches the runtime, in order."""
    noted = []
    graphs = torch_npu.npu.graphs

    def begin(graph, pool, capture_error_mode):
        noted.append(f"record {pool} {capture_error_mode}")

    monkeypatch.setattr(graphs.NPUGraph, "capture_begin", begin)
    monkeypatch.setattr(graphs.NPUGraph, "capture_end", lambda graph: noted.append("recorded"))
    monkeypatch.setattr(graphs.NPUGraph, "replay", lambda graph: noted.append("replay"))
    monkeypatch.setattr(graphs, "graph_task_group_begin", lambda stream: noted.append("keep"))
    monkeypatch.setattr(graphs, "graph_task_group_end", lambda stream: len(noted))
    monkeypatch.setattr(graphs, "graph_task_update_begin", lambda stream, handle: noted.append(f"update {handle}"))
    monkeypatch.setattr(graphs, "graph_task_update_end", lambda stream: None)
    return noted


@pytest.fixture
def lengths_of_calls(monkeypatch):
    """(query ends, cache lengths) that the attention kernel was called with."""
    import tests.npu.reference_kernels as kernels

    seen = []
    check = kernels._check_attention_call

    def checked(*arguments):
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        given = frame.f_back.f_locals
        seen.append((given["actual_seq_lengths"], given["actual_seq_lengths_kv"]))
        check(*arguments)

    monkeypatch.setattr(kernels, "_check_attention_call", checked)
    return seen


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # what torch_npu copies tensors by
def test_a_step_is_recorded_once_and_each_replay_has_its_own_lengths(torch_npu, runtime, lengths_of_calls):
    npu = torch_npu.npu
    device = PagedDevice()
    features = NpuFeatures(True, True, True, cache_write="reshape_and_cache", attention=True)
    device.ops = NpuOps(torch_npu, features, causal_mask(CPU))
    model = DecoderModel.load(
        CONFIG, TrackedWeights(RandomWeights(), lambda: None),
        cast(Device, SimpleNamespace(ops=device.ops, torch_device=CPU)), torch.bfloat16,
    )  # fmt: skip
    cache = KvCache(device, model.kv_specs, 2, 6, BLOCK, num_scratch_blocks=1)
    recorder = NpuRecorder(npu)
    graphs = AcceleratorGraphs(npu, npu.Stream(torch.device("npu", 0)), recorder.record, 1 << 20)
    steps = DecodeGraphs(model, cache, device, graphs, [GraphSize(4, 3)])
    steps.record()
    # Twice two layers: as it is, then recorded, with the longest lengths that the tables can have.
    assert lengths_of_calls == [([1, 2, 3, 4], [3 * BLOCK] * 4)] * 4
    assert runtime == [f"record {recorder._pool} thread_local", "keep", "keep", "recorded"]
    runtime.clear()
    lengths_of_calls.clear()
    scheduled = [
        ScheduledSequence(1, array("I", [7]), 300, (4, 2, 1), True, 301),
        ScheduledSequence(2, array("I", [9]), 5, (3,), True, 6),
    ]
    with torch.inference_mode():
        replayed = steps.forward(scheduled)
    assert replayed is not None
    batch, hidden = replayed
    assert runtime == ["update 2", "update 3", "replay"], "each kept call, before the graph is started"
    assert lengths_of_calls == [([1, 2, 3, 4], [301, 6, 1, 2])] * 2
    assert hidden.shape == (4, CONFIG.hidden_size)
    assert batch.sampled_rows.tolist() == [0, 1]
    assert batch.meta.slot_mapping.tolist() == [BLOCK + 44, 3 * BLOCK + 5, 6 * BLOCK, 6 * BLOCK + 1]


def test_an_update_that_fails_starts_nothing(torch_npu, runtime, monkeypatch):
    recorder = NpuRecorder(torch_npu.npu)
    stream = torch_npu.npu.Stream(torch.device("npu", 0))
    graph = recorder.record(lambda: None, stream)
    graph.replay([1])
    assert runtime == [f"record {recorder._pool} thread_local", "recorded", "replay"], "nothing to update"
    runtime.clear()
    monkeypatch.setattr(graph._handle, "auto_dispatch_capture", False)  # then it cannot be updated
    with pytest.raises(RuntimeError, match="does not support update"):
        graph.replay([1])
    assert runtime == []
