"""`GET /metrics`: Prometheus' text format, for all workers of this gunicorn."""

import asyncio

from falcon.asgi import Request, Response

from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.metrics import CONTENT_TYPE
from kvferry.router.http.resources.base import GetResource


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
