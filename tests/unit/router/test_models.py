"""Which names a router worker answers 503 for, and which 404, while nodes have not told of themselves yet."""

import logging
from collections.abc import Iterator

import pytest

from kvferry.common.base.clock import ManualClock
from kvferry.common.base.errors import UnavailableError
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.router.service import RouterService, ServiceSettings
from tests.support.transport import transport_context

TOLD = ModelInfo(name="told", vocab_size=8, max_model_len=64, max_position_embeddings=64)


@pytest.fixture
def service() -> Iterator[RouterService]:
    with transport_context() as context:
        settings = ServiceSettings("w", Timers(), Limits(), configured_models=("configured",))
        yield RouterService(settings, ManualClock(), context, logging.getLogger("tests.models"))


def test_before_any_node_told_of_itself_no_name_is_called_unknown(service: RouterService):
    with pytest.raises(UnavailableError, match="no node serves the model configured yet"):
        service.model("configured")
    with pytest.raises(UnavailableError, match="no node has told of itself yet"):
        service.model("another")
    assert service.models() == ()


def test_after_that_only_the_configured_model_is_still_waited_for(service: RouterService):
    service.core.models[TOLD.name] = TOLD
    assert service.model("told") == TOLD
    assert service.model("another") is None
    with pytest.raises(UnavailableError, match="no node serves the model configured yet"):
        service.model("configured")
