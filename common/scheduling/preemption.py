"""Who gives its blocks back when decoding sequences need more than there are. One pure choice, no state."""

from collections.abc import Iterable

from common.scheduling.sequence import Sequence


def rank(seq: Sequence) -> tuple[int, float, int]:
    """Best first: class, then age. Fixed over a sequence's life, so that the best one stays the best till it ends."""
    return seq.spec.priority, seq.spec.accepted_at, seq.seq_id


def choose_victim(decoding: Iterable[Sequence], max_preempt: int) -> Sequence | None:
    """The youngest of the lowest class; None when nobody may be taken.

    Never the oldest of the best class: it finishes, whatever happens to the others. Never one that was given back
    max_preempt times: it got its blocks to the end at once. Nor one whose blocks a step or a transport still touches.
    """
    candidates = list(decoding)
    if not candidates:
        return None
    safe = min(candidates, key=rank)
    eligible = [
        seq
        for seq in candidates
        if seq is not safe and seq.spec.times_preempted < max_preempt and not seq.steps_in_flight and not seq.pins
    ]
    return max(eligible, key=rank, default=None)
