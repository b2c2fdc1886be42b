"""The text of `ops/docs/rules_tested.md`: which test files cover which protocol rule. A library: writes no file.

Reads `@pytest.mark.rule(...)` from the source of the tests, without importing them.
`python -m kvferry.ops.docs_build.protocol` writes the page.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_HEAD = """\
# Where each rule is tested

Made from `@pytest.mark.rule(...)` in the tests by `python -m kvferry.ops.docs_build.protocol`; do not edit.

Each of these tests fails when its rule of [protocol.md](protocol.md) is taken out of the code. `pytest --rule 24` runs
the tests of one rule. Defects that the simulation must notice: [defects.md](defects.md).

| rule | tests |
| --- | --- |
"""


def rule_titles(protocol_page: str) -> dict[int, str]:
    """Number of a rule -> its heading in `protocol.md`."""
    return {
        int(number): title for number, title in re.findall(r"^### (\d+)\. (.+)$", protocol_page, flags=re.MULTILINE)
    }


def marked_tests(root: Path = ROOT) -> dict[int, Counter[str]]:
    """Number of a rule -> path of a test file, relative to `root` -> number of tests there that carry the mark."""
    found: dict[int, Counter[str]] = {}
    for file in sorted(root.glob("tests/**/test_*.py")):
        path = file.relative_to(root).as_posix()
        for number in _marks(ast.parse(file.read_text(encoding="utf-8"))):
            found.setdefault(number, Counter())[path] += 1
    return found


def rules_page(protocol_page: str, root: Path = ROOT) -> str:
    """The whole page."""
    marked = marked_tests(root)
    rows = (
        f"| {number} {title} | {_files(marked.get(number, Counter()))} |"
        for number, title in rule_titles(protocol_page).items()
    )
    return _HEAD + "\n".join(rows) + "\n"


def _files(counts: Counter[str]) -> str:
    return ", ".join(f"`{path.removeprefix('tests/')}` ({count})" for path, count in sorted(counts.items())) or "-"


def _marks(module: ast.Module) -> Iterator[int]:
    """The rules of each test, once for each test that carries the mark; a mark of a class or module counts for all."""
    for_all = [
        number
        for statement in module.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
        for number in _rules_of(statement.value)
    ]
    for test in _tests(module):
        yield from for_all
        yield from (number for decorator in test.decorator_list for number in _rules_of(decorator))
    for group in (statement for statement in module.body if isinstance(statement, ast.ClassDef)):
        numbers = [number for decorator in group.decorator_list for number in _rules_of(decorator)]
        yield from (number for _ in _tests(group) for number in numbers)


def _tests(parent: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(parent) if isinstance(node, kinds) and node.name.startswith("test_")]


def _rules_of(expression: ast.expr) -> list[int]:
    """The arguments of every `pytest.mark.rule(...)` within an expression."""
    calls = (node for node in ast.walk(expression) if isinstance(node, ast.Call))
    arguments = [arg for call in calls if ast.unparse(call.func) == "pytest.mark.rule" for arg in call.args]
    return [arg.value for arg in arguments if isinstance(arg, ast.Constant) and isinstance(arg.value, int)]
