"""Seeded defects of swapping, for `mutations.py`: each takes the correct function and returns a wrong one."""

from collections.abc import Callable
from dataclasses import replace

from kvferry.common.scheduling.sequence import Sequence, SequenceStatus
from kvferry.common.scheduling.step_builder import StepBuilder
from kvferry.common.scheduling.swapping import Swapping

Patched = Callable[..., object]


def free_uncopied(right: Patched) -> Patched:
    """Frees device blocks when the copy is scheduled, not when it is done."""

    def swap_out(self: Swapping, seq: Sequence, batch: StepBuilder, now: float) -> object:
        done = right(self, seq, batch, now)
        if done:
            self._pool.release(seq.seq_id)
            self._table.move(seq, SequenceStatus.SWAPPED)
        return done

    return swap_out


def other_host_blocks(right: Patched) -> Patched:
    """Copies from the neighbours of the right host blocks."""

    def swap_in(self: Swapping, seq: Sequence, batch: StepBuilder, keep_free: int) -> object:
        done = right(self, seq, batch, keep_free)
        if done:
            copies = batch.swap_in[-1]
            others = tuple((block + 1) % self._host.num_total for block in copies.host_blocks)
            batch.swap_in[-1] = replace(copies, host_blocks=others)
        return done

    return swap_in


def return_uncopied(right: Patched) -> Patched:
    """Copies nothing back."""

    def swap_in(self: Swapping, seq: Sequence, batch: StepBuilder, keep_free: int) -> object:
        done = right(self, seq, batch, keep_free)
        if done:
            copies = batch.swap_in[-1]
            batch.swap_in[-1] = replace(copies, device_blocks=(), host_blocks=())
        return done

    return swap_in
