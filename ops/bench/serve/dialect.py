"""The two token APIs that are measured, as pure translation: a prompt to a body, an event to what it brought.

How the tokens of an event are counted: by the ids in it where there are some; else by the server's own running count;
else one for an event with text in it, which is too few where a server puts several tokens into one (`counted_by` says
which it was, and the final count, where the server gives one, decides how many there were in all).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import quote

import orjson

from kvferry.ops.cli.pluralize import pluralize

CountedBy = Literal["ids", "usage", "events"]


class EventError(Exception):
    """An event that says that the request failed, or that is none of this API. `kind` is fit for counting."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(slots=True)
class Progress:
    """How far one stream is. The dialect keeps it up to date."""

    tokens: int = 0
    total: int | None = None
    """The server's final count."""
    counted_by: CountedBy = "ids"
    finished: bool = False


class Dialect(Protocol):
    """One API."""

    name: str
    path: str

    def body(self, prompt: Sequence[int], output_len: int) -> bytes:
        """A streamed, greedy request."""
        ...

    def read(self, data: bytes, progress: Progress) -> int:
        """How many tokens an event brought; also updates `progress`. Raises EventError."""
        ...


class InferDialect:
    """`POST /v2/models/{model}/infer`, streamed."""

    name = "infer"

    def __init__(self, model: str, timeout_s: int) -> None:
        self.path = f"/v2/models/{quote(model, safe='')}/infer"
        self._timeout_s = timeout_s

    def body(self, prompt: Sequence[int], output_len: int) -> bytes:
        """As the API has it; the server's own deadline is that of the benchmark."""
        tensor = {"name": "input0", "shape": [1, len(prompt)], "datatype": "UINT32", "data": list(prompt)}
        parameters = {"max_new_tokens": output_len, "do_sample": False, "timeout": self._timeout_s}
        return orjson.dumps({"inputs": [tensor], "outputs": [{"name": "output0"}], "parameters": parameters})

    def read(self, data: bytes, progress: Progress) -> int:
        """An index that is not the next one is an error: a token was lost or sent twice."""
        event = _object(data)
        if "error" in event:
            raise EventError("error_event", f"{event.get('error_type')}: {event['error']}")
        ids = event.get("token_ids")
        if not isinstance(ids, list):
            raise EventError("garbage", f"an event without token_ids: {data[:80]!r}")
        if event.get("index") != progress.tokens:
            raise EventError("wrong_index", f"index {event.get('index')} after {pluralize(progress.tokens, 'token')}")
        progress.tokens += len(ids)
        progress.finished = "finish_reason" in event
        return len(ids)


@dataclass(frozen=True, slots=True)
class Extras:
    """What an OpenAI-style server is asked beyond the plain request, so that tokens can be counted."""

    fields: Mapping[str, object]


EXTRAS = (
    Extras(
        {
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }
    ),
    Extras({"stream_options": {"include_usage": True}}),
    Extras({}),
)
"""From most to least; the first that a server does not refuse is used."""


class OpenAiDialect:
    """`POST /v1/completions` with a prompt of token ids, streamed."""

    name = "openai"
    path = "/v1/completions"

    def __init__(self, model: str, extras: Extras = EXTRAS[-1], *, ignore_eos: bool = False) -> None:
        self._model = model
        self._fields = dict(extras.fields) | ({"ignore_eos": True} if ignore_eos else {})

    def body(self, prompt: Sequence[int], output_len: int) -> bytes:
        """Greedy."""
        fields: dict[str, object] = {"model": self._model, "prompt": list(prompt), "max_tokens": output_len}
        return orjson.dumps(fields | {"temperature": 0, "stream": True} | self._fields)

    def read(self, data: bytes, progress: Progress) -> int:
        """`[DONE]` ends a stream."""
        if data == b"[DONE]":
            progress.finished = True
            return 0
        event = _object(data)
        if "error" in event:
            raise EventError("error_event", str(event["error"])[:200])
        said = _completion_tokens(event)
        progress.total = progress.total if said is None else said
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise EventError("garbage", f"an event without choices: {data[:80]!r}")
        if not choices:
            return 0
        new = self._count(choices[0], said, progress)
        progress.tokens += new
        return new

    @staticmethod
    def _count(choice: object, said: int | None, progress: Progress) -> int:
        if not isinstance(choice, dict):
            raise EventError("garbage", "a choice that is no object")
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            return len(ids)
        if said is not None and progress.counted_by != "events":
            progress.counted_by = "usage"
            return max(0, said - progress.tokens)
        if not choice.get("text"):
            return 0
        progress.counted_by = "events"
        return 1


def _object(data: bytes) -> dict[str, object]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        raise EventError("garbage", f"not an event of a token stream: {data[:80]!r}")
    return event


def _completion_tokens(event: Mapping[str, object]) -> int | None:
    usage = event.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None
