"""The facts of a request, as router, prefill node and decode node keep and send them. Plain data, no decisions, no IO.

A fact that a later feature needs is one field here, set where the router reads the body and read where it matters:
no message and no table in between spells the fields out.
"""

from array import array

import msgspec

from kvferry.common.base.ranges import Count, Priority
from kvferry.common.protocol.sampling_params import SamplingParams

TokenIds = array
"""`array('I')`: token ids as they are on the wire, little-endian uint32."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be generated, for which prompt, and how. Times and places are the message's that carries it."""

    model: str
    prompt_token_ids: "array[int]"
    output_token_ids: "array[int]"
    """Ids that earlier attempts produced and the worker holds; they count towards max_new_tokens."""
    sampling: SamplingParams
    priority: Priority
    """1 (first) to 5."""
    times_preempted: Count = 0
    """How often decode nodes preempted this request."""
    cache_salt: str = ""
    """Part of the identity of its prefix blocks: requests of other salts share none. Empty: no salt (none yet)."""
    adapter: str = ""
    """The adapter that the model is served with, part of the same identity. Empty: none (none yet)."""
    trace: str = ""
    """W3C traceparent, empty for none."""

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output ids together."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_left_tokens(self) -> int:
        """Output tokens that are still to be sampled, at most."""
        return self.sampling.max_new_tokens - len(self.output_token_ids)
