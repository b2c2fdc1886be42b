"""What the router core asks of its shell beyond links and messages: tokens for a client, the end of a request."""

from dataclasses import dataclass

from kvferry.common.base.ids import RequestId
from kvferry.common.cluster.actions import Action
from kvferry.router.api import EndEvent, TokensEvent


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give the client new tokens."""

    request_id: RequestId
    event: TokensEvent


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """Give the client the one end of its request."""

    request_id: RequestId
    event: EndEvent


Effect = Action | Deliver | FinishRequest
