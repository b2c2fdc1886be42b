"""Which model names are answered with 503 and which with 404 before nodes have registered."""

import logging
from collections.abc import Iterator

import pytest

from kvferry.common.base.clock import ManualClock
from kvferry.common.base.errors import UnavailableError
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.router.service import RouterService, ServiceSettings
from tests.support.transport import transport_context

REGISTERED = ModelInfo(name="registered", vocab_size=8, max_model_len=64, max_position_embeddings=64)


@pytest.fixture
def service() -> Iterator[RouterService]:
    with transport_context() as context:
        settings = ServiceSettings("w", Timers(), Limits(), configured_models=("configured",))
        yield RouterService(settings, ManualClock(), context, logging.getLogger("tests.models"))


def test_before_any_node_registered_no_model_is_unknown(service: RouterService):
    with pytest.raises(UnavailableError, match="no node serves the model configured yet"):
        service.model("configured")
    with pytest.raises(UnavailableError, match="no node has registered yet"):
        service.model("another")
    assert service.models() == ()


def test_after_a_node_registered_only_the_configured_model_is_still_awaited(service: RouterService):
    service.core.models[REGISTERED.name] = REGISTERED
    assert service.model("registered") == REGISTERED
    assert service.model("another") is None
    with pytest.raises(UnavailableError, match="no node serves the model configured yet"):
        service.model("configured")
