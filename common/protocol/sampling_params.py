"""How the next token is chosen. Plain data, resolved by the router: no defaults are left open here."""

import msgspec

from kvferry.common.base.ranges import Count, Positions, PositiveFloat, Probability, Seed, TokenId


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the next token depends on besides the logits.

    Order of effects: repetition penalty over prompt and output (logit > 0 divided, else multiplied), then
    temperature, top_k, top_p (the token that crosses p is kept), then sampling with noise from (seed, position).
    """

    max_new_tokens: Positions
    """Total number of output tokens over all attempts; already cut to what the model's length allows."""
    seed: Seed = 0
    """0 to 2**64 - 1. With the absolute position it fixes every sampled token."""
    do_sample: bool = False
    """False: arg-max of the penalised logits; temperature, top_k and top_p have no effect then."""
    temperature: PositiveFloat = 1.0
    top_k: Count = 0
    """0 means the whole vocabulary."""
    top_p: Probability = 1.0
    repetition_penalty: PositiveFloat = 1.0
    ignore_eos: bool = False
    """For benchmarks: generate max_new_tokens, ignoring end-of-sequence ids."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Further ids that end generation, besides the model's own eos ids; counted like these."""
