"""How long things take in the simulated world. Plain numbers; sizing puts measured ones here."""

from dataclasses import dataclass

from kvferry.common.scheduling.step import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Linear costs; seconds, tokens, bytes."""

    step_s: float = 0.008
    prompt_token_s: float = 0.0004
    decode_token_s: float = 0.0005
    swap_block_s: float = 0.0005
    """One block between device and host."""
    kv_bytes_per_s: float = 2e8
    kv_message_s: float = 0.0005

    def step_duration_s(self, plan: StepBatch) -> float:
        """One call of the model runner."""
        prompt = sum(len(part.token_ids) for part in plan.scheduled if len(part.token_ids) > 1)
        decode = sum(1 for part in plan.scheduled if len(part.token_ids) == 1)
        return self.step_s + prompt * self.prompt_token_s + decode * self.decode_token_s

    def swap_duration_s(self, plan: StepBatch) -> float:
        """The copies of a plan, before anything is computed."""
        return self.swap_block_s * sum(len(copies.host_blocks) for copies in (*plan.swap_out, *plan.swap_in))

    def piece_duration_s(self, num_bytes: int) -> float:
        """Reading one piece and putting it on the wire."""
        return self.kv_message_s + num_bytes / self.kv_bytes_per_s
