"""`POST /v2/models/{model}/infer` and `/infer_stream`: token ids in, token ids out, as one JSON object or as events.

Checks come in a fixed order: model, size of the body, JSON, fields, availability. Decides nothing about placement.
"""

from falcon.asgi import Request, Response

from kvferry.common.base.errors import ModelNotFoundError
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.router.api import EndEvent, TokensEvent
from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.errors import ClientGoneError, error_of_end
from kvferry.router.http.exchange import Exchange, exchange_of
from kvferry.router.http.generation import Generation
from kvferry.router.http.json_body.faults import describe_value
from kvferry.router.http.json_body.reader import read_json_body
from kvferry.router.http.sse import EVENT_STREAM, EventStream, wants_event_stream
from kvferry.router.http.validation import CheckedInfer, check_infer, infer_answer


def known_model(deps: AppDependencies, name: str) -> ModelInfo:
    """The model of that name. Raises ModelNotFoundError if no node has ever registered it."""
    model = deps.service.model(name)
    if model is None:
        known = ", ".join(info.name for info in deps.service.models()) or "none yet"
        raise ModelNotFoundError(f"model {describe_value(name)} is not known; known models: {known}")
    return model


async def start_infer(deps: AppDependencies, exchange: Exchange, model_name: str) -> tuple[CheckedInfer, Generation]:
    """Read and check the body, and submit the request. From then on a disconnect of the client cancels it.

    Raises the exceptions that `router.http.errors` maps, before any work was started.
    """
    model = known_model(deps, model_name)
    exchange.model = model.name
    deps.metrics.received(model.name)
    settings = deps.settings
    body = await read_json_body(exchange, settings.max_body_bytes, model.vocab_size, settings.body_timeout_s)
    checked = check_infer(
        body,
        model,
        max_input_length=settings.max_input_length,
        max_iter_times=settings.max_iter_times,
        request_id=exchange.request_id,
        seed=deps.new_seed(),
    )
    exchange.client_id = checked.request.client_id
    stream = deps.service.submit(checked.request)
    generation = Generation(checked.request, stream, exchange, deps.metrics, deps.clock)
    exchange.watch(lambda: generation.cancel("the client disconnected"))
    return checked, generation


class InferResource:
    """One JSON object, or events if the Accept header asks for them."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        if wants_event_stream(req.accept):
            await _answer_with_events(self._deps, req, resp, model)
            return
        exchange = exchange_of(req)
        checked, generation = await start_infer(self._deps, exchange, model)
        try:
            token_ids = await _collect(exchange, generation)
        finally:
            generation.close()
        resp.data = infer_answer(checked.client_id, checked.output_name, token_ids)


class InferStreamResource:
    """Events, whatever the Accept header asks for."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        await _answer_with_events(self._deps, req, resp, model)


async def _collect(exchange: Exchange, generation: Generation) -> list[int]:
    """All tokens of a generation that ends with stop or length; raises for any other end."""
    token_ids: list[int] = []
    while isinstance(event := await generation.next_event(), TokensEvent):
        token_ids.extend(event.token_ids)
    _raise_unless_served(exchange, event)
    return token_ids


async def _answer_with_events(deps: AppDependencies, req: Request, resp: Response, model: str) -> None:
    """Make `resp` a stream of events. The head waits for the first event, so that an early error has its own status."""
    exchange = exchange_of(req)
    checked, generation = await start_infer(deps, exchange, model)
    try:
        first = await generation.next_event()
        if isinstance(first, EndEvent):
            _raise_unless_served(exchange, first)
    except BaseException:
        generation.close()
        raise
    resp.content_type = EVENT_STREAM
    resp.set_header("Cache-Control", "no-cache")
    resp.set_header("X-Accel-Buffering", "no")
    resp.stream = EventStream(checked.client_id, first, generation, deps.logger)


def _raise_unless_served(exchange: Exchange, end: EndEvent) -> None:
    if exchange.gone:
        raise ClientGoneError("the client disconnected before its answer")
    error = error_of_end(end)
    if error is not None:
        raise error
