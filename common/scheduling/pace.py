"""How long this node takes for a token of a prompt, from the steps it made: whose turn it is depends on it. Pure.

A prompt's turn is when it would be computed had the node nothing else to do: its time of acceptance and the time it
takes. Short prompts so pass long ones that came a little earlier, and each waits only for what comes within the time
that it takes itself. (First come, first served makes one long prompt everybody's wait; shortest first starves it.)
"""

from kvferry.common.scheduling.step import StepPlan

_KEPT_SHARE = 0.9
"""Of what is known, with each step: the last ten count for most of it."""


class Pace:
    """Seconds for a token of a prompt, an average that forgets.

    Before anything is known it is 0: first come, first served.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    @property
    def prompt_token_s(self) -> float:
        """Of a step's time, what each of its tokens took."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def seen(self, plan: StepPlan, duration_s: float) -> None:
        """A step came back. One that mostly decodes says nothing of prompts, and a long one more than a short one."""
        sizes = [len(part.token_ids) for part in plan.scheduled]
        num_prompt_tokens = sum(size for size in sizes if size > 1)
        if num_prompt_tokens >= len(sizes) > 0:
            self._seconds = _KEPT_SHARE * self._seconds + duration_s
            self._tokens = _KEPT_SHARE * self._tokens + num_prompt_tokens

    def turn_at(self, accepted_at: float, num_tokens: int) -> float:
        """When a prompt of so many tokens would be computed if it were alone, on the clock of accepted_at."""
        return accepted_at + num_tokens * self.prompt_token_s
