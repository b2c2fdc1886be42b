"""One submitted request as the HTTP side sees it: passes its events on, times and counts them, ends exactly once."""

from kvferry.common.base.clock import Clock
from kvferry.common.base.errors import InvariantError
from kvferry.router.api import EndEvent, GenerateRequest, StreamEvent, TokensEvent, TokenStream
from kvferry.router.http.exchange import Exchange
from kvferry.router.http.metrics import RouterMetrics


class Generation:
    """The events of one stream: TokensEvents with indices in order, then one EndEvent."""

    def __init__(
        self, request: GenerateRequest, stream: TokenStream, exchange: Exchange, metrics: RouterMetrics, clock: Clock
    ) -> None:
        self.num_tokens = 0
        """Tokens passed on so far."""
        self._model = request.spec.model
        self._stream = stream
        self._events = stream.__aiter__()
        self._exchange = exchange
        self._metrics = metrics
        self._clock = clock
        self._first_token_s: float | None = None
        self._ended = False
        metrics.submitted(request.spec.model)

    async def next_event(self) -> StreamEvent:
        """Wait for the next event; nothing follows the EndEvent.

        Raises InvariantError for a stream that violates the order of TokenStream, and the stream's own exceptions.
        """
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            raise InvariantError("a token stream ended without an end event") from None
        if isinstance(event, TokensEvent):
            self._count(event)
        else:
            self._end(event)
        return event

    def cancel(self, reason: str) -> None:
        """Cancel for a client that disconnected: the stream's next event is its end."""
        self._stream.cancel(reason)

    def close(self) -> None:
        """Release the stream; cancel a generation that has not ended. Idempotent."""
        if not self._ended:
            self._ended = True
            self._exchange.outcome = "cancelled"
            self._stream.cancel("abandoned")
            self._metrics.generation_over(self._model, had_tokens=self._first_token_s is not None)

    def check_invariants(self) -> None:
        """Raise InvariantError where counts and states contradict one another."""
        if (self.num_tokens > 0) != (self._first_token_s is not None):
            raise InvariantError("tokens without a time of the first, or a time without tokens")

    def _count(self, event: TokensEvent) -> None:
        if event.index != self.num_tokens or not event.token_ids or self._ended:
            raise InvariantError(f"{len(event.token_ids)} tokens at index {event.index}, expected {self.num_tokens}")
        self.num_tokens += len(event.token_ids)
        if self._first_token_s is None:
            self._first_token_s = self._clock.now()
            self._metrics.first_token(self._model, self._first_token_s - self._exchange.started_s)

    def _end(self, event: EndEvent) -> None:
        self._ended = True
        self._exchange.outcome = event.outcome
        self._exchange.generation = event
        now = self._clock.now()
        decode_s = now - self._first_token_s if self._first_token_s is not None else 0.0
        self._metrics.generation_over(self._model, had_tokens=self._first_token_s is not None)
        self._metrics.generated(self._model, event, now - self._exchange.started_s, decode_s)
