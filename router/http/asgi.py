"""The shapes of ASGI that the HTTP layer touches. Types only."""

from collections.abc import Awaitable, Callable, MutableMapping

Scope = MutableMapping[str, object]
Message = MutableMapping[str, object]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def message_bytes(message: Message) -> bytes:
    """The `body` of an `http.request` or `http.response.body` message; empty where there is none."""
    body = message.get("body", b"")
    if not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(f"an ASGI body is bytes, not {type(body).__name__}")
    return bytes(body)
