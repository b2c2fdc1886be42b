"""A client's end of one request: a queue of its events in the worker's loop. Decides nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable

from kvferry.common.ids import RequestId
from kvferry.router.api import EndEvent, StreamEvent


class QueuedStream:
    """The TokenStream that the service hands out. Events are put by the service, taken by one reader."""

    def __init__(self, request_id: RequestId, on_cancel: Callable[[RequestId, str], None]) -> None:
        self.request_id = request_id
        self._on_cancel = on_cancel
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._ended = False

    def put(self, event: StreamEvent) -> None:
        """Add an event; nothing may follow an EndEvent."""
        self._events.put_nowait(event)
        self._ended = self._ended or isinstance(event, EndEvent)

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        """Yield the events up to the end, in order."""
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, EndEvent):
                return

    def cancel(self, reason: str) -> None:
        """Stop the request; no effect once it has ended."""
        if not self._ended:
            self._on_cancel(self.request_id, reason)
