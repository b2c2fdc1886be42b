"""The walkthrough and its neighbours name functions that exist, and the walkthrough counts its steps correctly."""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "ops" / "docs" / "walkthrough.md"
WITH_FUNCTIONS = (PAGE, *(ROOT / "ops" / "docs" / name for name in ("theory.md", "tree.md")), ROOT / "CONTRIBUTING.md")
FUNCTION = re.compile(r"`([a-z_]+/[\w/]+\.py)::([\w.]+)`")
STEP = re.compile(r"^ ?(\d+)\. `([a-z_]+/[\w/]+\.py)::", flags=re.MULTILINE)
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def names_in(path: str) -> frozenset[str]:
    """Classes, functions and methods of a file."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, DEFINITIONS):
            names |= {node.name} | {
                f"{node.name}.{below.name}" for below in node.body if isinstance(below, DEFINITIONS)
            }
    return frozenset(names)


def routes() -> dict[str, str]:
    """Title of a route -> its text."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("page", WITH_FUNCTIONS, ids=lambda page: page.name)
def test_functions_named_by_a_page_exist(page: Path):
    named = FUNCTION.findall(page.read_text(encoding="utf-8"))
    assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []


def test_there_are_four_routes():
    assert len(routes()) == 4


@pytest.mark.parametrize("text", routes().values(), ids=routes())
def test_steps_are_numbered_and_counted(text: str):
    steps = STEP.findall(text)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert len(steps) > 15
    files = [path for _, path in steps]
    changes = sum(PurePath(before).parent != PurePath(after).parent for before, after in pairwise(files))
    last_line = text.rstrip().splitlines()[-1]
    assert last_line == f"{len(steps)} steps, {len(set(files))} files, {changes} changes of folder."
