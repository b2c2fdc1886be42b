"""Settings of the scheduler. Plain data; named as in the cluster file."""

from dataclasses import dataclass

from kvferry.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of one node's scheduler. Shares are of the pool's blocks."""

    eos_token_ids: frozenset[int] = frozenset()
    """The model's own."""
    vocab_size: int = 2**32
    """Ids at or beyond it have no row in the model's tables: a sequence with one is refused."""
    max_step_tokens: int = 512
    """Token budget of one step: decode tokens first, the rest for prompt chunks."""
    max_chunk_tokens: int = 0
    """Most tokens of one prompt in a step while others want some too; 0: no such bound."""
    max_running: int = 256
    """Sequences that compute, decode, or are reserved, together."""
    max_steps_in_flight: int = 1
    """From 2 on the next step of what decodes is planned while its token is being drawn."""
    aging_s: float = 10.0
    """Waiting this long raises a sequence by one priority class."""
    max_preempt: int = 3
    """A request that was given back this often is not given back again."""
    swap_wait_s: float = 2.0
    """A swapped-out sequence that gets no blocks for this long is given back."""
    reserved_share: float = 0.5
    """Uncommitted reservations hold no more than this (a single one may, when it is alone)."""
    watermark_blocks_share: float = 0.02
    """Kept free while sequences decode, so that these can grow; rounded up to whole blocks."""

    def __post_init__(self) -> None:
        if min(self.max_step_tokens, self.max_running, self.max_steps_in_flight, self.vocab_size) < 1:
            raise ConfigError("max_step_tokens, max_running, max_steps_in_flight, vocab_size must be at least 1")
        if self.max_running > self.max_step_tokens:
            raise ConfigError(
                f"max_running ({self.max_running}) must not exceed max_step_tokens ({self.max_step_tokens}): "
                "prompts would get no share of a step"
            )
        if self.max_chunk_tokens < 0 or self.max_preempt < 0:
            raise ConfigError("max_chunk_tokens and max_preempt must not be negative")
        if self.aging_s <= 0 or self.swap_wait_s <= 0:
            raise ConfigError("aging_s and swap_wait_s must be positive")
        if not (0 < self.reserved_share <= 1 and 0 <= self.watermark_blocks_share < 1):
            raise ConfigError("reserved_share must lie in (0, 1], watermark_blocks_share in [0, 1)")
