"""The two token APIs that can be measured: builds request bodies and reads events. Pure.

The tokens of an event are counted by its token ids; without ids, by the server's running count; without that, as one
per event with text, which is too few if a server sends several tokens in an event. `counted_by` records which. The
server's final count, if any, is the total.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import quote

import orjson

from kvferry.ops.cli.pluralize import pluralize

CountedBy = Literal["ids", "usage", "events"]


class EventError(Exception):
    """An event reports a failure, or is not valid in this API. `kind` is a key for counting errors."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(slots=True)
class Progress:
    """Progress of one stream, updated by the dialect."""

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
        """Number of tokens in an event; updates `progress`. Raises EventError."""
        ...


class InferDialect:
    """`POST /v2/models/{model}/infer`, streamed."""

    name = "infer"

    def __init__(self, model: str, timeout_s: int) -> None:
        self.path = f"/v2/models/{quote(model, safe='')}/infer"
        self._timeout_s = timeout_s

    def body(self, prompt: Sequence[int], output_len: int) -> bytes:
        """A streamed, greedy request with the benchmark's timeout."""
        tensor = {"name": "input0", "shape": [1, len(prompt)], "datatype": "UINT32", "data": list(prompt)}
        parameters = {"max_new_tokens": output_len, "do_sample": False, "timeout": self._timeout_s}
        return orjson.dumps({"inputs": [tensor], "outputs": [{"name": "output0"}], "parameters": parameters})

    def read(self, data: bytes, progress: Progress) -> int:
        """An index other than the next one is an error: a token was lost or repeated."""
        event = _object(data)
        if "error" in event:
            raise EventError("error_event", f"{event.get('error_type')}: {event['error']}")
        ids = event.get("token_ids")
        if not isinstance(ids, list):
            raise EventError("garbage", f"event without token_ids: {data[:80]!r}")
        if event.get("index") != progress.tokens:
            raise EventError("wrong_index", f"index {event.get('index')} after {pluralize(progress.tokens, 'token')}")
        progress.tokens += len(ids)
        progress.finished = "finish_reason" in event
        return len(ids)


@dataclass(frozen=True, slots=True)
class Extras:
    """Fields for an OpenAI-style server beyond the plain request, to count tokens."""

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
"""From most to fewest fields; the first that a server accepts is used."""


class OpenAiDialect:
    """`POST /v1/completions` with a prompt of token ids, streamed."""

    name = "openai"
    path = "/v1/completions"

    def __init__(self, model: str, extras: Extras = EXTRAS[-1], *, ignore_eos: bool = False) -> None:
        self._model = model
        self._fields = dict(extras.fields) | ({"ignore_eos": True} if ignore_eos else {})

    def body(self, prompt: Sequence[int], output_len: int) -> bytes:
        fields: dict[str, object] = {"model": self._model, "prompt": list(prompt), "max_tokens": output_len}
        return orjson.dumps(fields | {"temperature": 0, "stream": True} | self._fields)

    def read(self, data: bytes, progress: Progress) -> int:
        if data == b"[DONE]":
            progress.finished = True
            return 0
        event = _object(data)
        if "error" in event:
            raise EventError("error_event", str(event["error"])[:200])
        running = _completion_tokens(event)
        progress.total = progress.total if running is None else running
        choices = event.get("choices")
        if not isinstance(choices, list):
            raise EventError("garbage", f"event without choices: {data[:80]!r}")
        if not choices:
            return 0
        new = self._count(choices[0], running, progress)
        progress.tokens += new
        return new

    @staticmethod
    def _count(choice: object, running: int | None, progress: Progress) -> int:
        if not isinstance(choice, dict):
            raise EventError("garbage", "choice is not an object")
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            return len(ids)
        if running is not None and progress.counted_by != "events":
            progress.counted_by = "usage"
            return max(0, running - progress.tokens)
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
        raise EventError("garbage", f"expected an event of a token stream, got {data[:80]!r}")
    return event


def _completion_tokens(event: Mapping[str, object]) -> int | None:
    usage = event.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None
