"""Every rule of the protocol page has tests that carry its mark, and marks name only rules of the page."""

from collections import Counter
from pathlib import Path

from kvferry.ops.docs_build.protocol import PROTOCOL
from kvferry.ops.docs_build.rules import marked_tests, rule_titles, rules_page

TITLES = rule_titles(PROTOCOL.read_text(encoding="utf-8"))

TEST_FILE = """
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.rule(3)]


@pytest.mark.rule(1, 2)
@pytest.mark.parametrize("x", [1, 2])
def test_one(x): ...


async def test_two(): ...


@pytest.mark.rule(2)
class TestGroup:
    def test_three(self): ...


@pytest.mark.rule(4)
def helper(): ...
"""


def test_every_rule_has_a_marked_test():
    assert TITLES.keys() - marked_tests().keys() == set()


def test_marks_name_rules_of_the_page():
    assert marked_tests().keys() - TITLES.keys() == set()


def test_marks_of_functions_classes_and_modules_are_read(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(TEST_FILE, encoding="utf-8")
    assert marked_tests(tmp_path) == {
        1: Counter({"tests/test_it.py": 1}),
        2: Counter({"tests/test_it.py": 2}),
        3: Counter({"tests/test_it.py": 3}),
    }


def test_the_page_has_one_row_per_rule(tmp_path: Path):
    page = rules_page("### 1. Hello\n\n### 2. Again\n", tmp_path)
    assert page.splitlines()[-2:] == ["| 1 Hello | - |", "| 2 Again | - |"]
