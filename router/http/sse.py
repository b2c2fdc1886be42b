"""Server-sent events: whether a request asks for them, their bytes, and the body that falcon streams after the head.

One event per TokensEvent, one for the end. After the head an error can only be sent as an event.
"""

import logging
from collections.abc import Mapping

import orjson

from kvferry.router.api import EndEvent, StreamEvent, TokensEvent
from kvferry.router.http.errors import Problem, error_of_end, is_internal_error, problem_of
from kvferry.router.http.generation import Generation

EVENT_STREAM = "text/event-stream"
_JSON = "application/json"


def wants_event_stream(accept: str) -> bool:
    """Whether `accept` names events and prefers them to JSON; of equal qualities the first wins.

    Wildcards do not count: without an explicit `text/event-stream` the answer is plain JSON.
    """
    best = ("", 0.0)
    for part in accept.lower().split(","):
        media_type, _, parameters = part.partition(";")
        quality = _quality(parameters)
        if media_type.strip() in (EVENT_STREAM, _JSON) and quality > best[1]:
            best = (media_type.strip(), quality)
    return best[0] == EVENT_STREAM


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def tokens_event(client_id: str, event: TokensEvent) -> bytes:
    return _event({"id": client_id, "index": event.index, "token_ids": event.token_ids})


def end_event(client_id: str, num_tokens: int, end: EndEvent) -> bytes:
    """The last event: how the generation ended, its token counts and the nodes that served it; no tokens."""
    error = error_of_end(end)
    fields: dict[str, object] = {"id": client_id}
    if error is None:
        fields |= {"index": num_tokens, "token_ids": ()}
    else:
        problem = problem_of(error)
        fields |= {"error": problem.message, "error_type": problem.error_type}
    usage = {
        "prompt_tokens": end.usage.prompt_tokens,
        "completion_tokens": end.usage.completion_tokens,
        "cached_tokens": end.usage.cached_tokens,
    }
    nodes = {"prefill": end.prefill_node, "decode": end.decode_node}
    return _event(fields | {"finish_reason": end.outcome, "usage": usage, "nodes": nodes})


def error_event(client_id: str, problem: Problem) -> bytes:
    """The last event of a stream that failed inside the router."""
    fields = {"error": problem.message, "error_type": problem.error_type, "finish_reason": "error"}
    return _event({"id": client_id} | fields)


class EventStream:
    """An asynchronous iterator of event bytes. Falcon calls `close` when the answer has ended for any reason."""

    def __init__(self, client_id: str, first: StreamEvent, generation: Generation, logger: logging.Logger) -> None:
        self._client_id = client_id
        self._pending: StreamEvent | None = first
        self._generation = generation
        self._logger = logger
        self._ended = False

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = self._pending or await self._generation.next_event()
        except Exception as error:
            self._ended = True
            problem = problem_of(error)
            if is_internal_error(problem):
                self._logger.error("a token stream failed", exc_info=error)
            return error_event(self._client_id, problem)
        self._pending = None
        if isinstance(event, TokensEvent):
            return tokens_event(self._client_id, event)
        self._ended = True
        return end_event(self._client_id, self._generation.num_tokens, event)

    async def close(self) -> None:
        """Close the generation, which cancels it unless it has ended."""
        self._generation.close()


def _event(fields: Mapping[str, object]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"
