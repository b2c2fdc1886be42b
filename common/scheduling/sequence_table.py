"""The sequences of a node, by id and by status. Frees the blocks of ended ones. Decides nothing about what runs.

Blocks of an ended sequence are freed, and the sequence is forgotten, when no step in flight names it and it is not
pinned: the engine may still write them, and a transport may still read them.
"""

from array import array
from collections.abc import Mapping

from kvferry.common.base.errors import InvariantError
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.kv.host_pool import HostPool
from kvferry.common.scheduling.sequence import Sequence, SequenceSpec, SequenceStatus


class SequenceTable:
    """Every sequence has exactly one status; all but waiting and swapped ones hold blocks of the pool."""

    def __init__(self, pool: BlockPool, host: HostPool) -> None:
        self._pool = pool
        self._host = host
        self._sequences: dict[int, Sequence] = {}
        self._by_status: dict[SequenceStatus, dict[int, Sequence]] = {status: {} for status in SequenceStatus}
        self._last_id = 0
        self._to_announce_finished: list[int] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def create(self, spec: SequenceSpec, status: SequenceStatus) -> Sequence:
        """Create a sequence with an unused id. The caller allocates its blocks."""
        self._last_id += 1
        seq = Sequence(self._last_id, spec, status, array("I", spec.token_ids))
        self._sequences[seq.seq_id] = self._by_status[status][seq.seq_id] = seq
        return seq

    @property
    def next_id(self) -> int:
        """The id that `create` will use: blocks can be acquired under it before the sequence exists."""
        return self._last_id + 1

    @property
    def live_ids(self) -> tuple[int, ...]:
        """Ids of all sequences that have not ended."""
        return tuple(seq_id for seq_id, seq in self._sequences.items() if seq.status is not SequenceStatus.ENDED)

    def find(self, seq_id: int) -> Sequence | None:
        """None: unknown or forgotten."""
        return self._sequences.get(seq_id)

    def get(self, seq_id: int, *statuses: SequenceStatus) -> Sequence:
        """Raises InvariantError when it is unknown or in none of `statuses` (if any are given)."""
        seq = self._sequences.get(seq_id)
        if seq is None:
            raise InvariantError(f"sequence {seq_id} is unknown or was forgotten")
        if statuses and seq.status not in statuses:
            wanted = ", ".join(status.value for status in statuses)
            raise InvariantError(f"sequence {seq_id} is {seq.status.value}, not {wanted}")
        return seq

    def members(self, status: SequenceStatus) -> dict[int, Sequence]:
        """All sequences in a status, in the order in which they entered it. The caller must not change the dict."""
        return self._by_status[status]

    def count(self, *statuses: SequenceStatus) -> int:
        return sum(len(self._by_status[status]) for status in statuses)

    def move(self, seq: Sequence, to: SequenceStatus) -> None:
        """Change its status, as TRANSITIONS allows."""
        old = seq.status
        seq.move(to)
        del self._by_status[old][seq.seq_id]
        self._by_status[to][seq.seq_id] = seq

    def end(self, seq: Sequence) -> None:
        """End it: forgotten now, or when the last step or pin releases its blocks."""
        self.move(seq, SequenceStatus.ENDED)
        self.settle(seq)

    def settle(self, seq: Sequence) -> None:
        """Free the blocks of an ended sequence, and forget it, unless a step or a pin still uses them."""
        if seq.status is not SequenceStatus.ENDED or seq.steps_in_flight or seq.pins:
            return
        if self._pool.holds(seq.seq_id):
            self._pool.release(seq.seq_id)
        if self._host.holds(seq.seq_id):
            self._host.release(seq.seq_id)
        del self._sequences[seq.seq_id]
        del self._by_status[SequenceStatus.ENDED][seq.seq_id]
        if seq.announced:
            self._to_announce_finished.append(seq.seq_id)

    def pin(self, seq_id: int) -> None:
        """Keep its blocks until `unpin`: a transport uses them."""
        seq = self.get(seq_id)
        if seq.status in (
            SequenceStatus.WAITING,
            SequenceStatus.SWAPPING,
            SequenceStatus.SWAPPED,
            SequenceStatus.ENDED,
        ):
            raise InvariantError(f"sequence {seq_id} is {seq.status.value}: no blocks to pin")
        seq.pins += 1

    def unpin(self, seq_id: int) -> None:
        """Remove one pin."""
        seq = self.get(seq_id)
        if seq.pins < 1:
            raise InvariantError(f"sequence {seq_id} is not pinned")
        seq.pins -= 1
        self.settle(seq)

    @property
    def tokens_in_flight(self) -> dict[int, int]:
        """seq_id -> tokens in flight, of sequences with any."""
        return {seq.seq_id: seq.tokens_in_flight for seq in self._sequences.values() if seq.tokens_in_flight}

    def take_finished(self) -> tuple[int, ...]:
        """Forgotten sequences that the model runner knows; each is returned once."""
        finished, self._to_announce_finished = tuple(self._to_announce_finished), []
        return finished

    def check_invariants(self, in_flight: Mapping[int, int]) -> None:
        """Raise InvariantError when statuses, ids, blocks and token counts disagree.

        in_flight: seq_id -> number of steps in flight that name it.
        """
        listed = {seq_id: status for status, members in self._by_status.items() for seq_id in members}
        if listed != {seq_id: seq.status for seq_id, seq in self._sequences.items()}:
            raise InvariantError("sequences: the index by status is wrong")
        if {seq.seq_id: seq.steps_in_flight for seq in self._sequences.values() if seq.steps_in_flight} != in_flight:
            raise InvariantError("sequences: counts of steps in flight are wrong")
        blockless = (SequenceStatus.WAITING, SequenceStatus.SWAPPED)
        with_blocks = {seq.seq_id for seq in self._sequences.values() if seq.status not in blockless}
        if with_blocks != self._pool.holders:
            raise InvariantError("sequences: those with blocks are not the holders in the pool")
        for seq_id in with_blocks:
            self._check_blocks(self._sequences[seq_id])

    def _check_blocks(self, seq: Sequence) -> None:
        if not 0 <= seq.num_computed_tokens <= seq.num_scheduled_tokens <= len(seq.token_ids) + _num_ahead(seq):
            raise InvariantError(f"sequence {seq.seq_id}: computed, scheduled and known tokens are out of order")
        if (
            seq.status is not SequenceStatus.ENDED
            and seq.num_outputs + seq.tokens_in_flight > seq.spec.sampling.max_new_tokens
        ):
            raise InvariantError(f"sequence {seq.seq_id}: more tokens in flight than max_new_tokens allows")
        if seq.num_scheduled_tokens > seq.num_computed_tokens and not seq.steps_in_flight:
            raise InvariantError(f"sequence {seq.seq_id}: tokens are scheduled in no step")
        if seq.status is SequenceStatus.ENDED and not (seq.steps_in_flight or seq.pins):
            raise InvariantError(f"sequence {seq.seq_id} has ended and is unused, but was not forgotten")
        capacity = len(self._pool.table(seq.seq_id)) * self._pool.block_size
        if capacity < seq.num_scheduled_tokens:
            raise InvariantError(f"sequence {seq.seq_id}: blocks for {capacity} tokens are too few")
        if self._pool.num_published_tokens(seq.seq_id) > seq.num_computed_tokens:
            raise InvariantError(f"sequence {seq.seq_id}: more is published than computed")


def _num_ahead(seq: Sequence) -> int:
    """Positions that may be scheduled without a known id: that of the first of two tokens in flight. Tokens of an ended
    sequence are dropped, so there the second one alone may account for it."""
    if seq.status is SequenceStatus.ENDED:
        return min(1, seq.tokens_in_flight)
    return 1 if seq.tokens_in_flight == 2 else 0
