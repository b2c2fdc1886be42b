"""What a node writes to its log about the messages that pass: one line each at debug, and what went wrong above it.

Never the contents: no token ids, no KV.
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


class Journal:
    """Writes lines about messages; costs nothing where a level is not enabled."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def received(self, peer: Incarnation, message: Message) -> None:
        """A message that came in."""
        if self._log.isEnabledFor(logging.DEBUG) and not isinstance(message, _FREQUENT):
            self._line(logging.DEBUG, "got %s from %s", type(message).__name__, peer, message)

    def sent(self, peer: Incarnation, message: Message) -> None:
        """A message that goes out. Failures are worth a line at their own level."""
        match message:
            case HandoverFailed(reason=reason, detail=detail):
                self._line(logging.INFO, "hand-over failed (%s): %s", reason, detail or "-", message)
            case CommitRefused(reason=reason) | Refused(reason=reason):
                self._line(logging.INFO, "%s a hand-over: %s", "refused", reason, message)
            case HelloRefused(reason=reason):
                self._line(logging.WARNING, "refused %s: %s", peer, reason, message)
            case Gone(reason=reason, detail=detail):
                self._line(logging.INFO, "no longer has it (%s): %s", reason, detail or "-", message)
            case _ if self._log.isEnabledFor(logging.DEBUG) and not isinstance(message, _FREQUENT):
                self._line(logging.DEBUG, "sent %s to %s", type(message).__name__, peer, message)

    def _line(self, level: int, text: str, first: str, second: str, message: Message) -> None:
        key = getattr(message, "key", message)
        request_id = getattr(key, "request_id", "")
        self._log.log(level, text, first, second, extra={"request_id": request_id} if request_id else None)
