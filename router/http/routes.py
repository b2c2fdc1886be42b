"""The route table: which resource serves which path. One line per path; every other path is 404."""

import re

import falcon.asgi
from falcon import HTTPNotFound
from falcon.asgi import Request, Response

from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.infer import InferResource, InferStreamResource
from kvferry.router.http.metadata import (
    LiveResource,
    MetricsResource,
    ModelConfigResource,
    ModelListResource,
    ModelResource,
    ReadyResource,
    ServerResource,
)

_VERSIONS = re.compile(r"/v2/models/[^/]+/versions(/|$)")


def routes(deps: AppDependencies) -> tuple[tuple[str, object], ...]:
    """All path templates with their resources."""
    ready = ReadyResource(deps)
    return (
        ("/v2/models/{model}/infer", InferResource(deps)),
        ("/v2/models/{model}/infer_stream", InferStreamResource(deps)),
        ("/v2", ServerResource(deps)),
        ("/v2/models/{model}", ModelResource(deps)),
        ("/v2/models/{model}/config", ModelConfigResource(deps)),
        ("/v2/models/{model}/ready", ready),
        ("/v1/models", ModelListResource(deps)),
        ("/v2/health/live", LiveResource()),
        ("/v2/health/ready", ready),
        ("/health", ready),
        ("/metrics", MetricsResource(deps)),
    )


def add_routes(app: falcon.asgi.App[Request, Response], deps: AppDependencies) -> None:
    for template, resource in routes(deps):
        app.add_route(template, resource)
    app.add_sink(_versions_are_not_supported, _VERSIONS)


async def _versions_are_not_supported(req: Request, resp: Response | None, **params: str) -> None:
    raise HTTPNotFound(description="model versions are not supported; leave /versions/... out of the path")
