"""Stand-in for device graphs on the CPU: records ops one by one and runs them again, with a real graph's restrictions.

Memory allocated before the recording must still exist at the same address when the graph is replayed. Memory allocated
by the recording is filled with garbage before each replay. Host values stay those of the recording. An op that makes
the host wait, or takes a value or a shape from the device, cannot be recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from kvferry.common.device.graphs import Graph, Graphs, Step
from tests.support.paged_device import PagedDevice

aten = torch.ops.aten
REFUSED = {
    aten._local_scalar_dense.default: "waits for a value",
    aten.equal.default: "waits for a value",
    aten.nonzero.default: "has a shape that depends on values",
    aten.masked_select.default: "has a shape that depends on values",
    aten.bincount.default: "has a shape that depends on values",
    aten.lift_fresh.default: "copies from memory of the host",
}


class ReplayedGraphs:
    """Implements `kvferry.common.device.graphs.Graphs`."""

    def __init__(self, most_tokens: int = 1 << 17) -> None:
        self.most_tokens = most_tokens
        self.replays: list[tuple[int, ...]] = []
        """The lengths passed to each replay."""

    def capture(self, step: Step) -> Graph:
        step()
        recording = _Recording()
        with recording:
            step()
        return _Replayed(recording, self.replays)


@dataclass
class _Outside:
    """A tensor in memory that the recording did not allocate."""

    storage: StorageWeakRef
    address: int
    like: tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "a graph reads or writes memory that is gone"
        assert storage.data_ptr() == self.address, "a graph reads or writes memory that has moved"
        size, stride, offset, dtype = self.like
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


@dataclass
class _Call:
    op: Callable[..., Any]
    inputs: Any
    """args and kwargs; tensors that the recording did not allocate are replaced by _Outside."""
    outputs: list[Tensor | None]
    """None: in memory that the recording did not allocate."""


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.made: list[Tensor] = []
        """One tensor for each storage that the recording allocated."""
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if func in REFUSED:
            raise RuntimeError(f"{func} {REFUSED[func]}")
        if func is aten.index.Tensor and any(tensor.dtype == torch.bool for tensor in given[1:]):
            raise RuntimeError(f"{func} has a shape that depends on values")
        inputs = tree_map(self._note, (args, kwargs))
        out = func(*args, **kwargs)
        before = {_address(tensor) for tensor in given}
        produced = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        for tensor in produced:
            if _address(tensor) not in before | self._own:
                self._own.add(_address(tensor))
                self.made.append(tensor)
        self.calls.append(_Call(func, inputs, [t if _address(t) in self._own else None for t in produced]))
        return out

    def _note(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or _address(leaf) in self._own:
            return leaf
        like = tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()), leaf.dtype
        return _Outside(StorageWeakRef(leaf.untyped_storage()), _address(leaf), like)


class _Replayed:
    """Implements `kvferry.common.device.graphs.Graph`."""

    def __init__(self, recording: _Recording, replays: list[tuple[int, ...]]) -> None:
        self._recording = recording
        self._replays = replays

    def replay(self, lengths: Sequence[int]) -> None:
        self._replays.append(tuple(lengths))
        with torch.inference_mode():
            for tensor in self._recording.made:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
            for call in self._recording.calls:
                args, kwargs = tree_map(lambda leaf: leaf.tensor() if isinstance(leaf, _Outside) else leaf, call.inputs)
                again = [leaf for leaf in tree_flatten(call.op(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
                for own, new in zip(call.outputs, again, strict=True):
                    if own is not None and _address(new) != _address(own):
                        own.copy_(new)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class GraphDevice(PagedDevice):
    """An accelerator with graphs: memory of its own, two steps in flight. All its recorders share one replay log."""

    def __init__(self) -> None:
        super().__init__()
        self.shares_host_memory = False
        self.default_steps_in_flight = 2
        self.replays: list[tuple[int, ...]] = []
        self.graphs = self._make

    def _make(self) -> Graphs:
        recorder = ReplayedGraphs()
        recorder.replays = self.replays
        return recorder
