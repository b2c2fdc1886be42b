"""Health: `/v2/health/live`, `/v2/health/ready`, `/health`, `/v2/models/{model}/ready`.

Live: this worker answers. Ready: a request would be served now; else 503 and why.
"""

from falcon.asgi import Request, Response

from kvferry.common.errors import UnavailableError
from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.infer_flow import known_model
from kvferry.router.http.resources.base import GetResource, answer_json


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
