"""A cluster that another command starts for a while: why it did not start, and what is reported when that command
fails."""

from pathlib import Path

import pytest

from kvferry.common.base.errors import ConfigError
from kvferry.ops.launcher.started import started_cluster
from tests.chaos.testbed import tiny_model

pytestmark = [pytest.mark.e2e]


def test_wrong_words_are_the_callers_to_blame():
    with (
        pytest.raises(ConfigError, match=r"did not start: kvferry serve: error: .*/nope"),
        started_cluster("--model", "/nope"),
    ):
        pass


def test_what_goes_wrong_meanwhile_is_reported_and_the_cluster_is_stopped(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), started_cluster("--model", str(tiny_model(tmp_path)), "--workers", "1"):
        raise KeyboardInterrupt
