"""The resources that answer GET: health, what is served, and metrics. They read; they start and change nothing.

Live means that this worker answers; ready, that a request would be served now (else 503 with the reason).
"""

import asyncio

import orjson
from falcon.asgi import Request, Response

from kvferry.common.base.errors import UnavailableError
from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.infer import known_model
from kvferry.router.http.metrics import CONTENT_TYPE
from kvferry.router.http.validation import DATATYPE, DEFAULT_OUTPUT_NAME, max_prompt_tokens

EXTENSIONS = ("model_configuration", "parameters", "schedule_policy")
"""Extensions of the v2 protocol, as far as they are supported."""
_INPUT_NAME = "input0"


class GetResource:
    """A resource that answers GET, and HEAD with the same head."""

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """Answer; `params` are the fields of the path."""
        raise NotImplementedError

    async def on_head(self, req: Request, resp: Response, **params: str) -> None:
        # falcon leaves the body out.
        await self.on_get(req, resp, **params)


class LiveResource(GetResource):
    """`/v2/health/live`: always 200."""

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        _answer(resp, {"live": True})


class ReadyResource(GetResource):
    """`/v2/health/ready`, `/health`: any model is served; `/v2/models/{model}/ready`: this model is served."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """200, 404 for an unknown model, or 503 with the reason."""
        name = params.get("model")
        if name is not None:
            known_model(self._deps, name)
        reason = self._deps.service.not_ready_reason(name)
        if reason is not None:
            raise UnavailableError(reason)
        _answer(resp, {"ready": True} if name is None else {"name": name, "ready": True})


class ServerResource(GetResource):
    """`/v2`: the server's name, version and extensions."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        _answer(resp, {"name": self._deps.server_name, "version": self._deps.version, "extensions": list(EXTENSIONS)})


class ModelResource(GetResource):
    """`/v2/models/{model}`: a model's inputs and outputs."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        model = known_model(self._deps, params["model"])
        _answer(
            resp,
            {
                "name": model.name,
                "platform": self._deps.server_name,
                "inputs": [{"name": _INPUT_NAME, "datatype": DATATYPE, "shape": [1, -1]}],
                "outputs": [{"name": DEFAULT_OUTPUT_NAME, "datatype": DATATYPE, "shape": [1, -1]}],
            },
        )


class ModelConfigResource(GetResource):
    """`/v2/models/{model}/config`: a model's limits and defaults at this router; lengths in tokens."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        model = known_model(self._deps, params["model"])
        settings = self._deps.settings
        _answer(
            resp,
            {
                "name": model.name,
                "platform": self._deps.server_name,
                "max_model_len": model.max_model_len,
                "max_position_embeddings": model.max_position_embeddings,
                "max_input_length": settings.max_input_length,
                "max_prompt_tokens": max_prompt_tokens(model, settings.max_input_length),
                "max_iter_times": settings.max_iter_times,
                "max_body_bytes": settings.max_body_bytes,
                "vocab_size": model.vocab_size,
                "eos_token_ids": list(model.eos_token_ids),
                "default_top_k": model.default_top_k,
                "default_do_sample": model.default_do_sample,
            },
        )


class ModelListResource(GetResource):
    """`/v1/models`: all models that nodes have registered, in OpenAI's form, by name; empty before the first node."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        deps = self._deps
        names = sorted(model.name for model in deps.service.models())
        data = [
            {"id": name, "object": "model", "created": deps.started_at, "owned_by": deps.server_name} for name in names
        ]
        _answer(resp, {"object": "list", "data": data})


class MetricsResource(GetResource):
    """`/metrics`: Prometheus' text format, for all workers of this gunicorn."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        service, metrics = self._deps.service, self._deps.metrics
        metrics.observe_service(tuple(model.name for model in service.models()), service.counts())
        resp.content_type = CONTENT_TYPE
        resp.data = await asyncio.to_thread(metrics.render) if metrics.reads_files else metrics.render()


def _answer(resp: Response, value: object) -> None:
    resp.data = orjson.dumps(value)
