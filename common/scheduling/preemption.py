"""Who gives its blocks back when decoding sequences need more than there are. One pure choice, no state."""

from collections.abc import Iterable

from kvferry.common.scheduling.sequence import Sequence


def rank(seq: Sequence) -> tuple[int, float, int]:
    """Best first: class, then age. Fixed over a sequence's life, so that the best one stays the best till it ends."""
    return seq.spec.priority, seq.spec.accepted_at, seq.seq_id


def best_of(*groups: Iterable[Sequence]) -> Sequence | None:
    """The oldest of the best class; None when there is nobody."""
    return min((seq for group in groups for seq in group), key=rank, default=None)


def choose_victim(decoding: Iterable[Sequence], safe: Sequence | None, max_preempt: int) -> Sequence | None:
    """The youngest of the lowest class; None when nobody may be taken.

    Never `safe`, the best of all that decode or are swapped out: it finishes, whatever happens to the others. Never one
    that was given back max_preempt times: it got its blocks to the end at once. Nor one whose blocks a step or a
    transport still touches.
    """
    eligible = [
        seq
        for seq in decoding
        if seq is not safe and seq.spec.times_preempted < max_preempt and not seq.steps_in_flight and not seq.pins
    ]
    return max(eligible, key=rank, default=None)
