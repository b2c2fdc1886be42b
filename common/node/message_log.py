"""Logs a node's messages: one line each at debug level, and failures at their own level.

Never logs contents: no token ids, no KV.
"""

import logging

from kvferry.common.base.ids import Incarnation
from kvferry.common.protocol.messages import (
    CommitRefused,
    FirstToken,
    Gone,
    HandoverFailed,
    Heartbeat,
    HelloRefused,
    Message,
    Refused,
    Status,
    Tokens,
)

_FREQUENT = (Heartbeat, Status, Tokens, FirstToken)


class MessageLog:
    """Logs received and sent messages; costs nothing for disabled levels."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def received(self, peer: Incarnation, message: Message) -> None:
        if self._log.isEnabledFor(logging.DEBUG) and not isinstance(message, _FREQUENT):
            self._line(logging.DEBUG, message, "received %s from %s", type(message).__name__, peer)

    def sent(self, peer: Incarnation, message: Message) -> None:
        match message:
            case HandoverFailed(reason=reason, detail=detail):
                self._line(logging.INFO, message, "hand-over failed (%s): %s", reason, detail or "-")
            case CommitRefused(reason=reason) | Refused(reason=reason):
                self._line(logging.INFO, message, "refused a hand-over: %s", reason)
            case HelloRefused(reason=reason):
                self._line(logging.WARNING, message, "refused %s: %s", peer, reason)
            case Gone(reason=reason, detail=detail):
                self._line(logging.INFO, message, "node dropped the request (%s): %s", reason, detail or "-")
            case _ if self._log.isEnabledFor(logging.DEBUG) and not isinstance(message, _FREQUENT):
                self._line(logging.DEBUG, message, "sent %s to %s", type(message).__name__, peer)

    def _line(self, level: int, message: Message, text: str, *values: str) -> None:
        key = getattr(message, "key", message)
        request_id = getattr(key, "request_id", "")
        self._log.log(level, text, *values, extra={"request_id": request_id} if request_id else None)
