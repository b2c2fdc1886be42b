"""Durations of the simulated world: plain numbers. Sizing substitutes measured ones."""

from dataclasses import dataclass

from kvferry.common.scheduling.step import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Linear costs in seconds per token, block and byte."""

    step_s: float = 0.008
    prompt_token_s: float = 0.0004
    decode_token_s: float = 0.0005
    swap_block_s: float = 0.0005
    """Copy of one block between device and host."""
    kv_bytes_per_s: float = 2e8
    kv_message_s: float = 0.0005

    def step_duration_s(self, batch: StepBatch) -> float:
        """Duration of one call of the model runner."""
        prompt = sum(len(part.token_ids) for part in batch.scheduled if len(part.token_ids) > 1)
        decode = sum(1 for part in batch.scheduled if len(part.token_ids) == 1)
        return self.step_s + prompt * self.prompt_token_s + decode * self.decode_token_s

    def swap_duration_s(self, batch: StepBatch) -> float:
        """Duration of the copies of a batch, which precede its computation."""
        return self.swap_block_s * sum(len(copies.host_blocks) for copies in (*batch.swap_out, *batch.swap_in))

    def piece_duration_s(self, num_bytes: int) -> float:
        """Duration of reading one piece and putting it on the wire."""
        return self.kv_message_s + num_bytes / self.kv_bytes_per_s
