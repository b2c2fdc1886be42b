"""Options of every test run: `--rule`, and how hypothesis picks its examples.

Hypothesis uses the same examples in each run and no time limit: a test that passes today must not fail tomorrow
because of an unrelated change or a busy machine. `pytest --hypothesis-profile search` tries other examples in each run.
"""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rule", type=int, metavar="N", help="run only the tests of this rule of ops/docs/protocol.md")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rule = config.getoption("--rule")
    if rule is None:
        return
    kept = [item for item in items if any(rule in mark.args for mark in item.iter_markers("rule"))]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
