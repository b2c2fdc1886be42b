"""May a sequence have its blocks? All or nothing, by the bounds of the configuration. Holds no state of its own."""

from math import ceil

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.kv.block_pool import BlockPool, BlockTable
from kvferry.common.scheduling.sequence import SchedulerConfig, Sequence, SequenceSpec, SequenceStatus
from kvferry.common.scheduling.sequence_table import SequenceTable
from kvferry.common.scheduling.waiting_queue import PRIORITIES

SWAPPED_OUT = (SequenceStatus.SWAPPING, SequenceStatus.SWAPPED)
"""Swapped out, or on the way. While there are any nothing new gets blocks: they were here first, and come back."""
RUNNING = (
    SequenceStatus.COMPUTING,
    SequenceStatus.PAUSED,
    SequenceStatus.RESERVED,
    SequenceStatus.COMMITTED,
    SequenceStatus.DECODING,
    *SWAPPED_OUT,
)
"""What max_running counts."""
WITH_KV = (SequenceStatus.COMPUTING, SequenceStatus.PAUSED, SequenceStatus.PREFILLED, SequenceStatus.DECODING)
"""Positions below num_computed_tokens have KV, and the engine wrote it."""


class Admission:
    """Acquires blocks for sequences that start, are reserved, or take over; says no by returning None or False."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, table: SequenceTable) -> None:
        self._config = config
        self._pool = pool
        self._table = table
        self._watermark_blocks = ceil(config.watermark_blocks_share * pool.num_total)
        self._max_reserved_blocks = int(config.reserved_share * pool.num_total)

    @property
    def num_running(self) -> int:
        """Sequences that max_running counts."""
        return self._table.count(*RUNNING)

    @property
    def _may_begin(self) -> bool:
        return self.num_running < self._config.max_running and not self._table.count(*SWAPPED_OUT)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks of uncommitted reservations."""
        return sum(len(self._pool.table(seq_id)) for seq_id in self._table.members(SequenceStatus.RESERVED))

    def check(self, spec: SequenceSpec, *, to_the_end: bool = False) -> None:
        """RequestInvalidError when the spec breaks a rule or could never get its blocks, even alone.

        to_the_end: whether it must fit with all its output; always so for mode decode.
        """
        if spec.token_ids.typecode != "I" or not 1 <= spec.num_prompt_tokens <= spec.num_known:
            raise RequestInvalidError(f"{spec.num_known} known ids and {spec.num_prompt_tokens} of them prompt")
        if spec.priority not in PRIORITIES:
            raise RequestInvalidError(f"priority {spec.priority} is not in 1..5")
        if spec.num_known - spec.num_prompt_tokens >= spec.sampling.max_new_tokens:
            raise RequestInvalidError(f"all {spec.sampling.max_new_tokens} output tokens are known already")
        largest = max(spec.token_ids)
        if largest >= self._config.vocab_size:
            raise RequestInvalidError(f"token id {largest} is outside the vocabulary [0, {self._config.vocab_size})")
        num_tokens = spec.max_kv_tokens if to_the_end or spec.mode == "decode" else spec.tokens_to_start
        if self._pool.blocks_for(num_tokens) > self._pool.num_total:
            raise RequestInvalidError(
                f"{num_tokens} tokens need {self._pool.blocks_for(num_tokens)} KV blocks of {self._pool.block_size}, "
                f"this node has {self._pool.num_total}"
            )

    def acquire(self, seq: Sequence) -> int | None:
        """Blocks for a sequence that starts here: number of cached tokens; None when there is no room.

        Cached are at most all known ids but the last: that one's logits are wanted, or it is handed on as it is.
        """
        if not self._may_begin:
            return None
        decode = seq.spec.mode == "decode"
        table = self._acquire(seq.seq_id, seq.spec, max_cached_tokens=seq.spec.num_known - 1, decode=decode)
        return None if table is None else table.num_cached_tokens

    def reserve(self, spec: SequenceSpec, seq_id: int) -> BlockTable | None:
        """Blocks for KV that comes from elsewhere. None: no room, by blocks, share, max_running, or swapped ones.

        Of a fresh prompt everything may be cached. Of a re-plan not the last id: the other side may hand that one
        over as the token to go on from, and its position is written here then.
        """
        if not self._may_begin:
            return None
        reserved = self.num_reserved_blocks
        wanted = self._pool.blocks_for(self._tokens_to_start(spec, decode=True))
        if reserved and reserved + wanted > self._max_reserved_blocks:
            return None
        max_cached_tokens = spec.num_known - 1 if spec.is_retry else spec.num_known
        return self._acquire(seq_id, spec, max_cached_tokens=max_cached_tokens, decode=True)

    def inherit(self, old: Sequence, new: Sequence) -> int | None:
        """Move the blocks of an earlier attempt to a waiting sequence: number of tokens it has KV for.

        None, and nothing changed: somebody still touches them, their ids are not those of the new one, some that the
        new one must write are final, or what is free does not make up for the rest.
        """
        last = new.spec.num_known - 1
        num_common = min(old.num_computed_tokens, last)
        if (
            old.status not in WITH_KV
            or old.steps_in_flight
            or old.pins
            or self.num_running - (old.status in RUNNING) >= self._config.max_running
            or self._pool.num_published_tokens(old.seq_id) > last
            or old.token_ids[:num_common] != new.token_ids[:num_common]
        ):
            return None
        self._pool.transfer(old.seq_id, new.seq_id)
        if not self._pool.grow(new.seq_id, self._tokens_to_start(new.spec, decode=new.spec.mode == "decode")):
            self._pool.transfer(new.seq_id, old.seq_id)
            return None
        return num_common

    def _tokens_to_start(self, spec: SequenceSpec, *, decode: bool) -> int:
        """One that may not be given back any more gets its blocks to the end at once: it never has to wait for
        others, so that decoding cannot lock up."""
        full = decode and spec.times_preempted >= self._config.max_preemptions
        return spec.max_kv_tokens if full else spec.tokens_to_start

    def _acquire(self, seq_id: int, spec: SequenceSpec, *, max_cached_tokens: int, decode: bool) -> BlockTable | None:
        return self._pool.acquire(
            seq_id,
            spec.token_ids,
            max_cached_tokens=max_cached_tokens,
            extra_tokens=self._tokens_to_start(spec, decode=decode) - spec.num_known,
            keep_free=self._watermark_blocks if self._table.count(SequenceStatus.DECODING) else 0,
            tries=spec.tries,
        )
