"""The queue of sequences without blocks: priority class with ageing, then turn. Pure; knows keys, not sequences.

The effective class is priority - floor(waited / aging_s). It has no lower end, so whoever waits overtakes in the end
whatever comes later: a class 5 entry stands before any class 1 entry whose turn is 4 * aging_s after its own.

How long this node takes for a token of a prompt, from the steps it made: whose turn it is depends on it. Pure.

A prompt's turn is when it would be computed had the node nothing else to do: its time of acceptance and the time it
takes. Short prompts so pass long ones that came a little earlier, and each waits only for what comes within the time
that it takes itself. (First come, first served makes one long prompt everybody's wait; shortest first starves it.)
"""

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvferry.common.base.errors import InvariantError
from kvferry.common.scheduling.step import StepBatch

PRIORITIES = range(1, 6)
COMPACT_AT = 64


class _Entry(NamedTuple):
    virtual_finish_time: float
    order: int
    """Number of the push: first come first served among equals, and tells a key's earlier life apart."""
    key: int


def effective_class(priority: int, since: float, now: float, aging_s: float) -> int:
    """Smaller is better. `since`: the time of acceptance, or the turn; one in the future counts as now."""
    return priority - int(max(0.0, now - since) // aging_s)


class WaitingQueue:
    """Entries by (effective class, turn, order of arrival). push and pop are O(log n), peek O(1).

    Within one priority the earliest turn is always the best, at any time; so one heap per priority, and the heads
    compared at the time of asking, are enough. Removed entries stay in their heap until they surface or are swept out.
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
        """Sum over all entries."""
        return self._total_tokens

    def push(self, key: int, priority: int, virtual_finish_time: float, num_tokens: int) -> None:
        """Add an entry. virtual_finish_time and `now` elsewhere are seconds of the same clock."""
        if key in self._live or priority not in self._heaps:
            raise InvariantError(f"waiting queue: key {key} with priority {priority}: known already, or no priority")
        self._num_pushed += 1
        entry = _Entry(virtual_finish_time, self._num_pushed, key)
        heappush(self._heaps[priority], entry)
        self._live[key] = (entry, priority, num_tokens)
        self._total_tokens += num_tokens

    def peek(self, now: float) -> int | None:
        """The key whose turn it is; None when empty."""
        best: tuple[int, float, int, int] | None = None
        for priority, heap in self._heaps.items():
            while heap and not self._is_live(heap[0]):
                heappop(heap)
            if heap:
                entry = heap[0]
                rank = (effective_class(priority, entry.virtual_finish_time, now, self._aging_s), *entry)
                best = rank if best is None or rank < best else best
        return None if best is None else best[-1]

    def pop(self, now: float) -> int | None:
        """Take the key whose turn it is out; None when empty."""
        key = self.peek(now)
        if key is not None:
            self.remove(key)
        return key

    def remove(self, key: int) -> None:
        """Take an entry out, wherever it stands."""
        if key not in self._live:
            raise InvariantError(f"waiting queue: key {key} is not in it")
        _, priority, num_tokens = self._live.pop(key)
        self._total_tokens -= num_tokens
        self._sweep(priority)

    def _is_live(self, entry: _Entry) -> bool:
        found = self._live.get(entry.key)
        return found is not None and found[0] is entry

    def _sweep(self, priority: int) -> None:
        """Keep a heap within twice the number of live entries (of all priorities), for amortised O(1)."""
        heap = self._heaps[priority]
        if len(heap) > COMPACT_AT + 2 * len(self._live):
            heap[:] = [entry for entry in heap if self._is_live(entry)]
            heapify(heap)

    def check_invariants(self) -> None:
        """Every live entry is in its heap once, and the total is the sum."""
        in_heaps = {
            entry.key: priority for priority, heap in self._heaps.items() for entry in heap if self._is_live(entry)
        }
        if in_heaps != {key: priority for key, (_, priority, _) in self._live.items()}:
            raise InvariantError("waiting queue: heaps and entries disagree")
        if self._total_tokens != sum(num_tokens for _, _, num_tokens in self._live.values()):
            raise InvariantError("waiting queue: the total of tokens is wrong")


_KEPT_SHARE = 0.9
"""Of what is known, with each step: the last ten count for most of it."""


class PrefillRate:
    """Seconds for a token of a prompt, an average that forgets.

    Before anything is known it is 0: first come, first served.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def prompt_token_s(self) -> float:
        """Of a step's time, what each of its tokens took."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def seen(self, plan: StepBatch, duration_s: float) -> None:
        """A step came back. One that mostly decodes says nothing of prompts, and a long one more than a short one."""
        sizes = [len(part.token_ids) for part in plan.scheduled]
        num_prompt_tokens = sum(size for size in sizes if size > 1)
        if num_prompt_tokens >= len(sizes) > 0:
            self._seconds = _KEPT_SHARE * self._seconds + duration_s
            self._tokens = _KEPT_SHARE * self._tokens + num_prompt_tokens

    def virtual_finish_time(self, accepted_at: float, num_tokens: int) -> float:
        """When a prompt of so many tokens would be computed if it were alone, on the clock of accepted_at."""
        return accepted_at + num_tokens * self.prompt_token_s
