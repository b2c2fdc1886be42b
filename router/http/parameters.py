"""The `parameters` object of a token request: types, ranges and defaults. Pure.

`null` means absent. Only the first violation is reported, in the order of `read_parameters`.
"""

import math
from dataclasses import dataclass
from typing import NoReturn

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.router.http.json_body.faults import describe_value

INT32_MAX = 2**31 - 1
SEED_MAX = 2**64 - 1
SMALLEST = 1e-6
"""Exclusive lower bound of divisors and shares."""
LAST_PRIORITY = 5
LONGEST_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """The checked parameters of a client; None for each that it did not give."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    do_sample: bool | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    priority: int | None = None
    timeout_s: int | None = None

    def resolve(self, model: ModelInfo, num_prompt_tokens: int, max_iter_times: int, seed: int) -> SamplingParams:
        """Fill in the defaults; `seed` is used if the client gave none.

        `num_prompt_tokens` must be below the model's max_model_len.
        """
        asked_to_sample = any(value is not None for value in (self.temperature, self.top_k, self.top_p))
        default_do_sample = asked_to_sample or model.default_do_sample
        max_new_tokens = 20 if self.max_new_tokens is None else self.max_new_tokens
        return SamplingParams(
            max_new_tokens=min(max_new_tokens, max_iter_times, model.max_model_len - num_prompt_tokens),
            seed=seed if self.seed is None else self.seed,
            do_sample=default_do_sample if self.do_sample is None else self.do_sample,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=min(model.default_top_k if self.top_k is None else self.top_k, model.vocab_size),
            top_p=1.0 if self.top_p is None else self.top_p,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
        )


def read_parameters(value: object, where: str) -> RequestParameters:
    """Check the object at `where` in the body. Raises RequestInvalidError naming the first invalid field."""
    if value is None:
        return RequestParameters()
    if not isinstance(value, dict):
        raise RequestInvalidError(f"{where}: must be an object, got {describe_value(value)}")
    fields = _Fields(value, where)
    temperature = fields.number("temperature", above=SMALLEST)
    top_k = fields.integer("top_k", 1, INT32_MAX)
    top_p = fields.number("top_p", above=SMALLEST, at_most=1.0)
    do_sample = fields.boolean("do_sample")
    seed = fields.integer("seed", 1, SEED_MAX)
    repetition_penalty = fields.number("repetition_penalty", above=0.0)
    max_new_tokens = fields.integer("max_new_tokens", 1, INT32_MAX)
    fields.boolean("watermark")
    fields.boolean("details")
    fields.integer("batch_size", 1, INT32_MAX)
    priority = fields.integer("priority", 1, LAST_PRIORITY)
    timeout_s = fields.integer("timeout", 1, LONGEST_TIMEOUT_S)
    return RequestParameters(
        temperature, top_k, top_p, do_sample, seed, repetition_penalty, max_new_tokens, priority, timeout_s
    )


class _Fields:
    """Typed access to a decoded JSON object; `where` is its place in the body, for error texts."""

    def __init__(self, values: dict[str, object], where: str) -> None:
        self._values = values
        self._where = where

    def number(self, name: str, *, above: float, at_most: float = math.inf) -> float | None:
        """A finite number in (above, at_most]: an int is accepted, a bool is not."""
        value = self._values.get(name)
        if value is None:
            return None
        rule = f"a finite number > {above:g}" + (f" and <= {at_most:g}" if at_most < math.inf else "")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(name, rule, value)
        if not above < value <= at_most:
            self._refuse(name, rule, value)
        try:
            number = float(value)
        except OverflowError:
            self._refuse(name, rule, value)
        if not math.isfinite(number):
            self._refuse(name, rule, value)
        return number

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high]: neither 1.0 nor a bool is accepted."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._refuse(name, f"an integer in [{low}, {high}]", value)
        return value

    def boolean(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is None or isinstance(value, bool):
            return value
        return self._refuse(name, "true or false", value)

    def _refuse(self, name: str, rule: str, value: object) -> NoReturn:
        raise RequestInvalidError(f"{self._where}.{name}: must be {rule}, got {describe_value(value)}")
