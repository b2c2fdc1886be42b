"""The one place where an exception becomes an HTTP status, an error type and a text. No IO, no logging.

Every error that a client sees is `{"error": what and where, "error_type": type}`, before or after the head.
"""

import math
from dataclasses import dataclass

import falcon
import orjson

from kvferry.common.base.errors import (
    GenerationError,
    InvariantError,
    KvferryError,
    ModelNotFoundError,
    OverloadedError,
    RequestInvalidError,
    UnavailableError,
)
from kvferry.router.api import EndEvent

INCOMPLETE = "Incomplete Generation"
CLIENT_GONE_STATUS = 499
"""For the access log only: the client has disconnected."""


class BodyTooLargeError(KvferryError):
    """The body is larger than the limit; it was not read completely."""


class BodyTooSlowError(KvferryError):
    """The body did not arrive in time; the part that did is dropped."""


class AmbiguousLengthError(KvferryError):
    """The head gives the body's length in two ways: a proxy in front of this server may have used the other one."""


class HttpVersionError(KvferryError):
    """The head names an unsupported version of HTTP."""


class DeadlineExceededError(KvferryError):
    """The request's own timeout passed."""


class GenerationCancelledError(KvferryError):
    """The request was stopped before its end, and not because its client disconnected."""


class ClientGoneError(KvferryError):
    """The client closed its connection before the answer was complete."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client sees it."""

    status: int
    error_type: str
    message: str
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> bytes:
        """The JSON of the answer."""
        return orjson.dumps({"error": self.message, "error_type": self.error_type})


_KINDS: tuple[tuple[type[KvferryError], int, str], ...] = (
    (RequestInvalidError, 422, "Input Validation Error"),
    (ModelNotFoundError, 404, "NotFoundError"),
    (BodyTooLargeError, 413, "Request Too Large"),
    (BodyTooSlowError, 408, "Request Timeout"),
    (AmbiguousLengthError, 400, "Bad Request"),
    (HttpVersionError, 505, "HTTP Version Not Supported"),
    (DeadlineExceededError, 408, "Request Timeout"),
    (GenerationError, 424, "Generation Error"),
    (OverloadedError, 429, "Too Many Requests"),
    (UnavailableError, 503, "Service Unavailable"),
    (ClientGoneError, CLIENT_GONE_STATUS, "Client Closed Request"),
    (InvariantError, 500, INCOMPLETE),
    (KvferryError, 500, INCOMPLETE),
)
_FALCON_TYPES = {404: "NotFoundError", 405: "MethodNotAllowed", 413: "Request Too Large"}
_INTERNAL_ERROR = "internal error; the router's log has the details"


def problem_of(error: BaseException) -> Problem:
    """Status, type and text for any exception. Foreign exceptions do not show their text."""
    if isinstance(error, falcon.HTTPError):
        return _problem_of_falcon(error)
    for kind, status, error_type in _KINDS:
        if isinstance(error, kind):
            text = _INTERNAL_ERROR if kind is InvariantError else str(error)
            return Problem(status, error_type, text or error_type, _headers(error, status))
    return Problem(500, INCOMPLETE, _INTERNAL_ERROR)


def error_of_end(end: EndEvent) -> BaseException | None:
    """The exception for an end other than stop or length; None for these two."""
    if end.outcome in ("stop", "length"):
        return None
    if end.outcome == "timeout":
        return DeadlineExceededError(_text_or(end.error, "the request's timeout passed before its generation ended"))
    if end.outcome == "cancelled":
        return GenerationCancelledError(_text_or(end.error, "the request was cancelled"))
    return end.error or KvferryError("generation ended with an error that has no description")


def is_internal_error(problem: Problem) -> bool:
    """Whether the log should have a traceback: a 500 that the client could not have avoided."""
    return problem.status == 500


def _text_or(error: Exception | None, text: str) -> str:
    return str(error) if isinstance(error, KvferryError) and str(error) else text


def _headers(error: BaseException, status: int) -> tuple[tuple[str, str], ...]:
    if isinstance(error, OverloadedError | UnavailableError):
        return (("Retry-After", str(max(1, math.ceil(error.retry_after_s)))),)
    if status == 413 or isinstance(error, BodyTooSlowError | AmbiguousLengthError | HttpVersionError):
        # The rest of the body is not read, so this connection cannot carry another request.
        return (("Connection", "close"),)
    return ()


def _problem_of_falcon(error: falcon.HTTPError) -> Problem:
    status = error.status_code
    raw = error.headers or {}
    headers = tuple(raw.items() if hasattr(raw, "items") else raw)
    text = error.description or error.title
    if isinstance(error, falcon.HTTPRouteNotFound):
        text = "no such path"
    elif isinstance(error, falcon.HTTPMethodNotAllowed):
        text = f"method not allowed here; allowed: {dict(headers).get('Allow', '')}"
    if status >= 500:
        return Problem(status, INCOMPLETE, _INTERNAL_ERROR, headers)
    return Problem(status, _FALCON_TYPES.get(status, "Input Validation Error"), text, headers)
