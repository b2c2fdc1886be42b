"""Effects of the router core besides links and messages: tokens for a client, the end of a request. Plain data."""

from dataclasses import dataclass

from kvferry.common.base.ids import RequestId
from kvferry.common.cluster.actions import Action
from kvferry.router.api import EndEvent, TokensEvent


@dataclass(frozen=True, slots=True)
class Deliver:
    """Pass new tokens to the client."""

    request_id: RequestId
    event: TokensEvent


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """Pass the one end of the request to the client."""

    request_id: RequestId
    event: EndEvent


Effect = Action | Deliver | FinishRequest
