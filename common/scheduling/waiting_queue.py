"""The queue of waiting sequences, and the measured prefill rate that orders it. Pure; knows keys, not sequences.

Entries are ordered by effective class, then by virtual finish time.

The effective class is priority - floor(waited / aging_s). It has no lower bound, so every entry overtakes later ones
eventually: a class 5 entry precedes any class 1 entry whose virtual finish time is 4 * aging_s or more after its own.

The virtual finish time of a prompt is when an otherwise idle node would have computed it: its acceptance time plus its
prefill time at the measured rate. Short prompts overtake long ones that arrived slightly earlier, and a prompt waits
only for prompts that arrive within its own prefill time. (First come, first served lets one long prompt delay all
others; shortest first starves long prompts.)
"""

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvferry.common.base.errors import InvariantError
from kvferry.common.scheduling.step import StepBatch

PRIORITIES = range(1, 6)
SWEEP_MARGIN = 64
"""Removed entries that a heap may hold beyond twice the number of live ones."""


class _Entry(NamedTuple):
    virtual_finish_time: float
    order: int
    """Number of the push: orders equal entries, and separates a key pushed again from its removed entry."""
    key: int


def effective_class(priority: int, since: float, now: float, aging_s: float) -> int:
    """Smaller runs first. `since`: the acceptance time or the virtual finish time; a future one counts as now."""
    return priority - int(max(0.0, now - since) // aging_s)


class WaitingQueue:
    """Entries by (effective class, virtual finish time, arrival). push is O(log n), peek and remove O(1), amortised.

    Within one priority the earliest virtual finish time is first at any time, so one heap per priority suffices; peek
    compares their heads. Removed entries stay in their heap until they reach its top or are swept out.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._heaps: dict[int, list[_Entry]] = {priority: [] for priority in PRIORITIES}
        self._live: dict[int, tuple[_Entry, int, int]] = {}
        self._num_pushed = 0
        self._total_tokens = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: int) -> bool:
        return key in self._live

    @property
    def total_tokens(self) -> int:
        return self._total_tokens

    def push(self, key: int, priority: int, virtual_finish_time: float, num_tokens: int) -> None:
        """Add an entry. virtual_finish_time is in seconds of the clock of `now`."""
        if key in self._live or priority not in self._heaps:
            raise InvariantError(f"waiting queue: key {key} with priority {priority}: queued already, or not in 1..5")
        self._num_pushed += 1
        entry = _Entry(virtual_finish_time, self._num_pushed, key)
        heappush(self._heaps[priority], entry)
        self._live[key] = (entry, priority, num_tokens)
        self._total_tokens += num_tokens

    def peek(self, now: float) -> int | None:
        """The first key; None when empty."""
        best: tuple[int, float, int, int] | None = None
        for priority, heap in self._heaps.items():
            while heap and not self._is_live(heap[0]):
                heappop(heap)
            if heap:
                entry = heap[0]
                rank = (effective_class(priority, entry.virtual_finish_time, now, self._aging_s), *entry)
                best = rank if best is None or rank < best else best
        return None if best is None else best[-1]

    def remove(self, key: int) -> None:
        """Remove an entry at any place. Raises InvariantError for an unknown key."""
        if key not in self._live:
            raise InvariantError(f"waiting queue: key {key} is not queued")
        _, priority, num_tokens = self._live.pop(key)
        self._total_tokens -= num_tokens
        self._sweep(priority)

    def _is_live(self, entry: _Entry) -> bool:
        found = self._live.get(entry.key)
        return found is not None and found[0] is entry

    def _sweep(self, priority: int) -> None:
        """Bound a heap by twice the number of live entries (of all priorities), for amortised O(1)."""
        heap = self._heaps[priority]
        if len(heap) > SWEEP_MARGIN + 2 * len(self._live):
            heap[:] = [entry for entry in heap if self._is_live(entry)]
            heapify(heap)

    def check_invariants(self) -> None:
        """Raise InvariantError unless every live entry is in its heap once and the token total is right."""
        in_heaps = {
            entry.key: priority for priority, heap in self._heaps.items() for entry in heap if self._is_live(entry)
        }
        if in_heaps != {key: priority for key, (_, priority, _) in self._live.items()}:
            raise InvariantError("waiting queue: heaps and entries disagree")
        if self._total_tokens != sum(num_tokens for _, _, num_tokens in self._live.values()):
            raise InvariantError("waiting queue: the token total is wrong")


_DECAY = 0.9
"""Exponential decay per step; time constant about ten steps."""


class PrefillRate:
    """Prefill time per token, an exponential moving average over steps. 0 before the first one, which makes the queue
    first come, first served."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def prompt_token_s(self) -> float:
        """Seconds per prompt token."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def observe(self, batch: StepBatch, duration_s: float) -> None:
        """Include a completed step, weighted by its size, unless it has more decode than prompt tokens."""
        sizes = [len(part.token_ids) for part in batch.scheduled]
        num_prompt_tokens = sum(size for size in sizes if size > 1)
        if num_prompt_tokens >= len(sizes) > 0:
            self._seconds = _DECAY * self._seconds + duration_s
            self._tokens = _DECAY * self._tokens + num_prompt_tokens

    def virtual_finish_time(self, accepted_at: float, num_tokens: int) -> float:
        """When a prompt of num_tokens would be computed if it ran alone, on the clock of accepted_at."""
        return accepted_at + num_tokens * self.prompt_token_s
