"""From an HTTP request to a running generation, in the order of the rules: model, size, JSON, fields, availability.

The steps that both answer forms (one JSON object, events) share. Falcon's request and response do not come here.

`POST /v2/models/{model}/infer` and `/infer_stream`: token ids in, token ids out.
"""

from falcon.asgi import Request, Response

from kvferry.common.base.errors import ModelNotFoundError
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.router.api import EndEvent, StreamEvent, TokensEvent
from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.describe_value import describe_value
from kvferry.router.http.document import read_document
from kvferry.router.http.errors import ClientGoneError, error_of_end
from kvferry.router.http.exchange import Exchange, exchange_of
from kvferry.router.http.generation import Generation
from kvferry.router.http.sse import (
    EVENT_STREAM,
    EventStream,
    wants_event_stream,
)
from kvferry.router.http.validation import CheckedInfer, check_infer, infer_answer


def known_model(deps: AppDependencies, name: str) -> ModelInfo:
    """The model of that name. Raises ModelNotFoundError where the router never knew one."""
    model = deps.service.model(name)
    if model is None:
        known = ", ".join(info.name for info in deps.service.models()) or "none yet"
        raise ModelNotFoundError(f"model {describe_value(name)} is not known here; known models: {known}")
    return model


async def start_infer(deps: AppDependencies, exchange: Exchange, model_name: str) -> tuple[CheckedInfer, Generation]:
    """Read and check the body, and submit what it asks for. From then on the client's leaving cancels the generation.

    Raises what `router.http.errors` maps; no work was started then.
    """
    model = known_model(deps, model_name)
    exchange.model = model.name
    deps.metrics.received(model.name)
    settings = deps.settings
    document = await read_document(exchange, settings.max_body_bytes, model.vocab_size, settings.body_timeout_s)
    checked = check_infer(
        document,
        model,
        max_input_length=settings.max_input_length,
        max_iter_times=settings.max_iter_times,
        request_id=exchange.request_id,
        seed=deps.new_seed(),
    )
    exchange.client_id = checked.request.client_id
    stream = deps.service.submit(checked.request)
    generation = Generation(checked.request, stream, exchange, deps.metrics, deps.clock)
    exchange.watch(lambda: generation.cancel("the client left"))
    return checked, generation


async def collect(exchange: Exchange, generation: Generation) -> list[int]:
    """All tokens of a generation that ends with stop or length. Raises what stands for any other end."""
    token_ids: list[int] = []
    while isinstance(event := await generation.next_event(), TokensEvent):
        token_ids.extend(event.token_ids)
    _raise_unless_served(exchange, event)
    return token_ids


async def first_event(exchange: Exchange, generation: Generation) -> StreamEvent:
    """The event that decides about the head. Raises what stands for an end without any token, other than stop."""
    event = await generation.next_event()
    if isinstance(event, EndEvent):
        _raise_unless_served(exchange, event)
    return event


def _raise_unless_served(exchange: Exchange, end: EndEvent) -> None:
    if exchange.gone:
        raise ClientGoneError("the client left before its answer")
    error = error_of_end(end)
    if error is not None:
        raise error


class InferResource:
    """One JSON answer, or events where the Accept header asks for them."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """Generate."""
        if wants_event_stream(req.accept):
            await answer_with_events(self._deps, req, resp, model)
            return
        exchange = exchange_of(req)
        checked, generation = await start_infer(self._deps, exchange, model)
        try:
            token_ids = await collect(exchange, generation)
        finally:
            generation.close()
        resp.data = infer_answer(checked.client_id, checked.output_name, token_ids)


class InferStreamResource:
    """Events, whatever the Accept header says."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_post(self, req: Request, resp: Response, model: str) -> None:
        """Generate."""
        await answer_with_events(self._deps, req, resp, model)


async def answer_with_events(deps: AppDependencies, req: Request, resp: Response, model: str) -> None:
    """Make `resp` a stream of events. The head waits for the first event, so that an early error has its own status."""
    exchange = exchange_of(req)
    checked, generation = await start_infer(deps, exchange, model)
    try:
        first = await first_event(exchange, generation)
    except BaseException:
        generation.close()
        raise
    resp.content_type = EVENT_STREAM
    resp.set_header("Cache-Control", "no-cache")
    resp.set_header("X-Accel-Buffering", "no")
    resp.stream = EventStream(checked.client_id, first, generation, deps.logger)
