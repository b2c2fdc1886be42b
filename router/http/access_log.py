"""One log record per HTTP request, when it is over. Formats and writes nothing itself: that is the logger's handler."""

import logging
from urllib.parse import quote

from router.http.errors import CLIENT_GONE_STATUS
from router.http.exchange import Exchange


def log_exchange(logger: logging.Logger, exchange: Exchange, duration_ms: float) -> None:
    """Write the record: request id, client's id, method, path, status, ms, outcome, and tokens where they were counted.

    A client that left is status 499 whatever head it was sent. The path is quoted: it is the client's text.
    """
    status = CLIENT_GONE_STATUS if exchange.gone else exchange.status
    usage = exchange.usage
    tokens = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens} if usage else {}
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
            **tokens,
        },
    )
