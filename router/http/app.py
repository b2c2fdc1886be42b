"""The router's HTTP application: falcon with its routes and error answers, inside the ASGI shell.

Creates nothing itself: sockets, service, clock and logs are passed in. `create_app` may be called before a worker
forks; everything bound to the worker's event loop starts in `AppDependencies.on_startup`.
"""

import falcon.asgi
from falcon.asgi import Request, Response

from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.errors import is_internal_error, problem_of
from kvferry.router.http.exchange import exchange_of
from kvferry.router.http.routes import add_routes
from kvferry.router.http.shell import AsgiShell

__all__ = ["AppDependencies", "create_app"]


def create_app(deps: AppDependencies) -> AsgiShell:
    """An ASGI application that serves the paths of `router.http.routes`."""
    app = falcon.asgi.App(media_type=falcon.MEDIA_JSON)

    async def answer_with_error(req: Request, resp: Response, error: Exception, params: dict[str, object]) -> None:
        problem = problem_of(error)
        if is_internal_error(problem):
            deps.logger.error("a request failed", exc_info=error, extra={"request_id": exchange_of(req).request_id})
        resp.status = problem.status
        resp.content_type = falcon.MEDIA_JSON
        resp.data = problem.body()
        for name, value in problem.headers:
            resp.set_header(name, value)

    app.add_error_handler(Exception, answer_with_error)
    # Falcon prefers the handler of the nearest base class, and has its own for HTTPError.
    app.add_error_handler(falcon.HTTPError, answer_with_error)
    add_routes(app, deps)
    return AsgiShell(app, deps)
