"""Recording without a GPU: the order of calls, and that torch.cuda's signatures accept the arguments."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvferry.common.device import cuda
from kvferry.common.device.graphs import AcceleratorGraphs


class Stream:
    """Logs waits."""

    def __init__(self, story: list[str]) -> None:
        self.story = story

    def synchronize(self) -> None:
        self.story.append("wait")


class Api:
    """The stream context only."""

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        stream.story.append("on the stream")
        yield
        stream.story.append("off it")


def test_a_step_runs_and_completes_before_it_is_recorded() -> None:
    story: list[str] = []

    class Graph:
        def replay(self, lengths: Any) -> None:
            story.append(f"replay {lengths}")

    def record(step: Any, stream: Stream) -> Graph:
        story.append("record")
        step()
        return Graph()

    graphs = AcceleratorGraphs(Api(), Stream(story), record, 9)
    graphs.capture(lambda: story.append("step")).replay((1, 2))
    assert story == ["on the stream", "step", "wait", "off it", "record", "step", "replay (1, 2)"]
    assert graphs.most_tokens == 9


def test_cuda_graphs_of_one_recorder_share_a_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = inspect.signature(torch.cuda.graph), list[dict[str, Any]]()

    class CUDAGraph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    @contextmanager
    def graph(*args: Any, **kwargs: Any) -> Iterator[None]:
        calls.append(real.bind(*args, **kwargs).arguments)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", iter([(0, 1), (0, 2)]).__next__)
    recorders = [cuda._Recorder(), cuda._Recorder()]
    stream: Any = object()
    graphs = [recorder.record(lambda: None, stream) for recorder in (*recorders, recorders[0])]
    assert [call["pool"] for call in calls] == [(0, 1), (0, 2), (0, 1)]
    assert all(call["capture_error_mode"] == "thread_local" and call["stream"] is stream for call in calls)
    graphs[0].replay([1])
    handles: list[Any] = [call["cuda_graph"] for call in calls]
    assert [handle.replays for handle in handles] == [1, 0, 0]
