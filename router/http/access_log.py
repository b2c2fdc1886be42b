"""One log record per HTTP request, when it has ended. Formatting and writing are left to the logger's handler."""

import logging
from urllib.parse import quote

from kvferry.router.api import EndEvent
from kvferry.router.http.errors import CLIENT_GONE_STATUS
from kvferry.router.http.exchange import Exchange


def log_exchange(logger: logging.Logger, exchange: Exchange, duration_ms: float) -> None:
    """Log request id, client's id, method, path, status, ms and outcome; of a generation also its token counts, the
    number of its placements and the nodes that served it last.

    A client that disconnected is logged with status 499 instead of the status sent. The path is quoted: it is the
    client's text.
    """
    status = CLIENT_GONE_STATUS if exchange.gone else exchange.status
    logger.info(
        "%s %s %d",
        quote(exchange.method),
        quote(exchange.path),
        status,
        extra={
            "request_id": exchange.request_id,
            "client_id": exchange.client_id,
            "method": exchange.method,
            "path": quote(exchange.path),
            "status": status,
            "ms": round(duration_ms, 1),
            "model": exchange.model,
            "outcome": exchange.outcome or "",
            **({} if exchange.generation is None else _of_generation(exchange.generation)),
        },
    )


def _of_generation(end: EndEvent) -> dict[str, str | int]:
    return {
        "prompt_tokens": end.usage.prompt_tokens,
        "completion_tokens": end.usage.completion_tokens,
        "attempts": end.attempts,
        "prefill_node": end.prefill_node,
        "decode_node": end.decode_node,
    }
