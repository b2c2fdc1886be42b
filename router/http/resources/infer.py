"""`POST /v2/models/{model}/infer` and `/infer_stream`: token ids in, token ids out."""

from falcon.asgi import Request, Response

from kvferry.router.http.accept import EVENT_STREAM, wants_event_stream
from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.infer_flow import collect, first_event, start_infer
from kvferry.router.http.resources.base import exchange_of
from kvferry.router.http.schemas import infer_answer
from kvferry.router.http.sse import EventStream


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
