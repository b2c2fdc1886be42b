"""What resources share: the exchange behind a falcon request, JSON answers, HEAD for whatever answers GET."""

from typing import cast

import orjson
from falcon.asgi import Request, Response

from kvferry.router.http.exchange import SCOPE_KEY, Exchange


def exchange_of(req: Request) -> Exchange:
    """The exchange that the shell put beside this request."""
    return cast("Exchange", req.scope[SCOPE_KEY])


def answer_json(resp: Response, value: object) -> None:
    """Make `value` the answer."""
    resp.data = orjson.dumps(value)


class GetResource:
    """A resource that answers GET, and HEAD with the same head."""

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """Answer; `params` are the fields of the path."""
        raise NotImplementedError

    async def on_head(self, req: Request, resp: Response, **params: str) -> None:
        """The head of what GET would answer; falcon leaves the body out."""
        await self.on_get(req, resp, **params)
