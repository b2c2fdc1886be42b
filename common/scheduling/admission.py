"""Admission of sequences: allocates their blocks, all or nothing, within configured limits. Pure; keeps no state."""

from math import ceil

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.kv.block_pool import BlockPool, BlockTable
from kvferry.common.scheduling.sequence import SchedulerConfig, Sequence, SequenceSpec, SequenceStatus
from kvferry.common.scheduling.sequence_table import SequenceTable
from kvferry.common.scheduling.waiting_queue import PRIORITIES

SWAPPED_OUT = (SequenceStatus.SWAPPING, SequenceStatus.SWAPPED)
"""While any sequence has one of these, no new one is admitted: the swapped ones were first and need their blocks
again."""
RUNNING = (
    SequenceStatus.COMPUTING,
    SequenceStatus.RESERVED,
    SequenceStatus.COMMITTED,
    SequenceStatus.DECODING,
    *SWAPPED_OUT,
)
"""Counted by max_running."""
WITH_KV = (SequenceStatus.COMPUTING, SequenceStatus.PREFILLED, SequenceStatus.DECODING)
"""Positions below num_computed_tokens have KV that this engine wrote."""


class Admission:
    """Allocates blocks for sequences that start, are reserved, or inherit; None means refused."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, table: SequenceTable) -> None:
        self._config = config
        self._pool = pool
        self._table = table
        self._watermark_blocks = ceil(config.watermark_blocks_share * pool.num_total)
        self._max_reserved_blocks = int(config.reserved_share * pool.num_total)

    @property
    def num_running(self) -> int:
        return self._table.count(*RUNNING)

    @property
    def _has_capacity(self) -> bool:
        return self.num_running < self._config.max_running and not self._table.count(*SWAPPED_OUT)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks held by uncommitted reservations."""
        return sum(len(self._pool.table(seq_id)) for seq_id in self._table.members(SequenceStatus.RESERVED))

    def check(self, spec: SequenceSpec, *, full_length: bool = False) -> None:
        """Raise RequestInvalidError when the spec is invalid or its blocks exceed the whole pool.

        full_length: include all output tokens; mode decode always does.
        """
        if spec.token_ids.typecode != "I" or not 1 <= spec.num_prompt_tokens <= spec.num_known:
            raise RequestInvalidError(
                f"num_prompt_tokens {spec.num_prompt_tokens} is not in 1..{spec.num_known}, the number of known ids"
            )
        if spec.priority not in PRIORITIES:
            raise RequestInvalidError(f"priority {spec.priority} is not in 1..5")
        if spec.num_known - spec.num_prompt_tokens >= spec.sampling.max_new_tokens:
            raise RequestInvalidError(f"all {spec.sampling.max_new_tokens} output tokens are known already")
        largest = max(spec.token_ids)
        if largest >= self._config.vocab_size:
            raise RequestInvalidError(f"token id {largest} is outside the vocabulary [0, {self._config.vocab_size})")
        num_tokens = spec.max_kv_tokens if full_length or spec.mode == "decode" else spec.tokens_to_start
        if self._pool.blocks_for(num_tokens) > self._pool.num_total:
            raise RequestInvalidError(
                f"{num_tokens} tokens need {self._pool.blocks_for(num_tokens)} KV blocks of {self._pool.block_size}, "
                f"this node has {self._pool.num_total}"
            )

    def acquire(self, seq: Sequence) -> int | None:
        """Allocate blocks for a waiting sequence. Returns the number of cached tokens; None: refused.

        The last known id never counts as cached: its logits are needed, or it is transferred as the next token.
        """
        if not self._has_capacity:
            return None
        decode = seq.spec.mode == "decode"
        table = self._acquire(seq.seq_id, seq.spec, max_cached_tokens=seq.spec.num_known - 1, decode=decode)
        return None if table is None else table.num_cached_tokens

    def reserve(self, spec: SequenceSpec, seq_id: int) -> BlockTable | None:
        """Allocate blocks for KV that another node sends.

        None: refused by free blocks, the watermark, reserved_share, max_running, or swapped-out sequences. A fresh
        prompt may be cached completely. With known output ids the last one is excluded: the prefill node may transfer
        it as the token to continue from, and then this node writes its position.
        """
        if not self._has_capacity:
            return None
        reserved = self.num_reserved_blocks
        wanted = self._pool.blocks_for(self._tokens_to_start(spec, decode=True))
        if reserved and reserved + wanted > self._max_reserved_blocks:
            return None
        max_cached_tokens = spec.num_known - 1 if spec.is_retry else spec.num_known
        return self._acquire(seq_id, spec, max_cached_tokens=max_cached_tokens, decode=True)

    def inherit(self, old: Sequence, new: Sequence) -> int | None:
        """Move the blocks of an earlier attempt to a waiting sequence. Returns the number of tokens that have KV.

        None, with nothing changed: a step or transport still uses the blocks, the ids differ, a position that the new
        sequence must write is published, or too few blocks are free for the remaining tokens.
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
        # A sequence that may not be preempted again gets blocks for its full length now. It never waits for others, so
        # decoding cannot deadlock.
        full = decode and spec.times_preempted >= self._config.max_preemptions
        return spec.max_kv_tokens if full else spec.tokens_to_start

    def _acquire(self, seq_id: int, spec: SequenceSpec, *, max_cached_tokens: int, decode: bool) -> BlockTable | None:
        return self._pool.acquire(
            seq_id,
            spec.token_ids,
            max_cached_tokens=max_cached_tokens,
            extra_tokens=self._tokens_to_start(spec, decode=decode) - spec.num_known,
            keep_free=self._watermark_blocks if self._table.count(SequenceStatus.DECODING) else 0,
            memo=spec.memo,
        )
