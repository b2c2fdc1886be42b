"""Health: `/v2/health/live`, `/v2/health/ready`, `/health`, `/v2/models/{model}/ready`.

Live: this worker answers. Ready: a request would be served now; else 503 and why.

What is served: `/v2`, `/v2/models/{model}`, `/v2/models/{model}/config`, `/v1/models`.

`GET /metrics`: Prometheus' text format, for all workers of this gunicorn.
"""

import asyncio

from falcon.asgi import Request, Response

from kvferry.common.base.errors import UnavailableError
from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.exchange import (
    GetResource,
    answer_json,
)
from kvferry.router.http.infer import known_model
from kvferry.router.http.metrics import CONTENT_TYPE
from kvferry.router.http.validation import (
    DATATYPE,
    DEFAULT_OUTPUT_NAME,
    max_prompt_tokens,
)


class LiveResource(GetResource):
    """This worker answers."""

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """Always 200."""
        answer_json(resp, {"live": True})


class ReadyResource(GetResource):
    """Some model, or the one that the path names, would be served now."""

    def __init__(self, deps: AppDependencies) -> None:
        self._service = deps.service
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """200, 404 for an unknown model, or 503 and why."""
        name = params.get("model")
        if name is not None:
            known_model(self._deps, name)
        reason = self._service.not_ready_reason(name)
        if reason is not None:
            raise UnavailableError(reason)
        answer_json(resp, {"ready": True} if name is None else {"name": name, "ready": True})


EXTENSIONS = ("model_configuration", "parameters", "schedule_policy")
"""Of the v2 protocol, as far as they are served."""
_INPUT_NAME = "input0"


class ServerResource(GetResource):
    """The server's own name, version and extensions."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """Server metadata."""
        answer_json(
            resp, {"name": self._deps.server_name, "version": self._deps.version, "extensions": list(EXTENSIONS)}
        )


class ModelResource(GetResource):
    """A model's inputs and outputs."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """Model metadata."""
        model = known_model(self._deps, params["model"])
        answer_json(
            resp,
            {
                "name": model.name,
                "platform": self._deps.server_name,
                "inputs": [{"name": _INPUT_NAME, "datatype": DATATYPE, "shape": [1, -1]}],
                "outputs": [{"name": DEFAULT_OUTPUT_NAME, "datatype": DATATYPE, "shape": [1, -1]}],
            },
        )


class ModelConfigResource(GetResource):
    """A model's limits here."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """Model configuration; lengths in tokens."""
        model = known_model(self._deps, params["model"])
        settings = self._deps.settings
        answer_json(
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
    """All models that nodes told of, in OpenAI's form."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """The list, by name; before the first node told of itself it is empty."""
        deps = self._deps
        names = sorted(model.name for model in deps.service.models())
        data = [
            {"id": name, "object": "model", "created": deps.started_at, "owned_by": deps.server_name} for name in names
        ]
        answer_json(resp, {"object": "list", "data": data})


class MetricsResource(GetResource):
    """All metrics."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """The numbers of this instant."""
        service, metrics = self._deps.service, self._deps.metrics
        metrics.observe_service(tuple(model.name for model in service.models()), service.counts())
        resp.content_type = CONTENT_TYPE
        resp.data = await asyncio.to_thread(metrics.render) if metrics.reads_files else metrics.render()
