"""The pages on states, messages and rules match the code: tables, states, messages, and the names that rules use."""

import ast
import importlib
import pkgutil
import re
from enum import Enum
from functools import cache
from pathlib import Path

import pytest

import kvferry.common
import kvferry.decode_node
import kvferry.ops.docs_build.protocol
import kvferry.prefill_node
import kvferry.router.core
from kvferry.common.cluster.table import Table
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.schema import NodeConfig
from kvferry.common.protocol.messages import MESSAGE_TYPES
from kvferry.common.scheduling.sequence import TRANSITIONS, SequenceStatus
from kvferry.ops.docs_build.protocol import PROTOCOL, RULES_TESTED, STATES, main, message_table, with_messages
from kvferry.ops.docs_build.rules import rules_page
from kvferry.ops.docs_build.states import all_machines, state_meanings, states_page, texts_below

MACHINES = all_machines()


def tables_of_the_code() -> dict[str, "Table[Enum, Enum]"]:
    """Every Table that a module of the cores has, by its name."""
    found: dict[str, Table[Enum, Enum]] = {}
    for package in (kvferry.common, kvferry.router.core, kvferry.prefill_node, kvferry.decode_node):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            name = info.name.removeprefix("kvferry.")
            if name.startswith("common.") and not name.startswith(("common.cluster", "common.scheduling")):
                continue
            module = importlib.import_module(info.name)
            found |= {value.name: value for value in vars(module).values() if isinstance(value, Table)}
    return found


def test_the_pages_are_up_to_date():
    assert STATES.read_text(encoding="utf-8") == states_page(), "run python -m kvferry.ops.docs_build.protocol"
    page = PROTOCOL.read_text(encoding="utf-8")
    assert with_messages(page) == page, "run python -m kvferry.ops.docs_build.protocol"
    assert RULES_TESTED.read_text(encoding="utf-8") == rules_page(page), "run python -m kvferry.ops.docs_build.protocol"
    assert main(["--check"]) == 0


def test_every_table_of_the_code_has_a_diagram():
    tables = tables_of_the_code()
    assert len(tables) >= 5
    assert {name.lower() for name in tables} == {machine.title.lower() for machine in MACHINES} - {"sequence"}
    for machine in MACHINES:
        if machine.title != "Sequence":
            table = next(table for name, table in tables.items() if name.lower() == machine.title.lower())
            assert {(state, event): to for state, event, to in machine.rows} == table.rows


def test_the_schedulers_transitions_have_a_diagram():
    rows = MACHINES[-1].rows
    assert {(here, to) for here, _, to in rows} == {(here, to) for here in SequenceStatus for to in TRANSITIONS[here]}
    assert MACHINES[-1].starts == (SequenceStatus.WAITING, SequenceStatus.RESERVED)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.title)
def test_every_state_and_event_has_a_meaning(machine):
    texts = state_meanings(machine.states)
    assert set(texts) == {state.name for state in machine.states}
    if machine.events is not None:
        texts |= texts_below(machine.events)
        assert {event.name for event in machine.events} <= set(texts)
    assert not any("|" in text for text in texts.values()), "a bar would end the table cell"


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.title)
def test_every_state_is_reachable_and_every_event_is_used(machine):
    reached = set(machine.starts)
    while True:
        more = reached | {to for here, _, to in machine.rows if here in reached}
        if more == reached:
            break
        reached = more
    assert reached == set(machine.states)
    if machine.events is not None:
        assert {event for _, event, _ in machine.rows} == set(machine.events)


def test_every_message_is_in_the_table():
    rows = [line for line in message_table().splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert [row.split(" | ")[1] for row in rows] == [cls.__name__ for _, cls in sorted(MESSAGE_TYPES.items())]
    for row, (_, cls) in zip(rows, sorted(MESSAGE_TYPES.items()), strict=True):
        assert row.count(" | ") == 3
        assert " → " in row.split(" | ")[2], "the docstring begins with the direction"
        assert all(name in row for name in cls.__struct_fields__)


def test_pages_out_of_date_are_reported_and_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    states, protocol, rules = tmp_path / "states.md", tmp_path / "protocol.md", tmp_path / "rules_tested.md"
    protocol.write_text(PROTOCOL.read_text(encoding="utf-8").replace("| 24 | Revoke", "| 99 | Recant"))
    monkeypatch.setattr(kvferry.ops.docs_build.protocol, "STATES", states)
    monkeypatch.setattr(kvferry.ops.docs_build.protocol, "PROTOCOL", protocol)
    monkeypatch.setattr(kvferry.ops.docs_build.protocol, "RULES_TESTED", rules)
    assert main(["--check"]) == 1
    assert "states.md is out of date" in capsys.readouterr().err
    assert not states.exists()
    assert main([]) == 0
    assert states.read_text(encoding="utf-8") == STATES.read_text(encoding="utf-8")
    assert rules.read_text(encoding="utf-8") == RULES_TESTED.read_text(encoding="utf-8")
    assert protocol.read_text(encoding="utf-8") == PROTOCOL.read_text(encoding="utf-8")
    assert main(["--check"]) == 0


def test_a_page_without_marks_around_the_table_is_refused():
    with pytest.raises(ValueError, match="marks"):
        with_messages("# Protocol\n")


# -- names on the page of rules

PAGE = PROTOCOL.read_text(encoding="utf-8")
ROOT = Path(__file__).parents[4]


def sections() -> dict[int, str]:
    parts = re.split(r"^### (\d+)\. ", PAGE, flags=re.MULTILINE)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


def where(number: int) -> str:
    """The last paragraph of a rule, which names its files."""
    return sections()[number].partition("\nWhere: ")[2].partition("\n\n")[0]


def test_every_rule_says_where_it_is():
    assert list(sections()) == list(range(1, 39))
    for number in sections():
        assert ".py" in where(number), number


@cache
def names_in(path: str) -> frozenset[str]:
    """Classes, functions and methods of a file."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, kinds):
            names |= {node.name} | {f"{node.name}.{below.name}" for below in node.body if isinstance(below, kinds)}
    return frozenset(names)


@pytest.mark.parametrize("number", sections())
def test_files_and_functions_named_by_a_rule_exist(number: int):
    named = re.findall(r"`([\w/]+\.py)(?:::([\w.]+))?`", sections()[number])
    assert named
    for path, name in named:
        assert (ROOT / path).is_file()
        assert not name or name in names_in(path), f"{path} has no {name}"


def test_timers_and_limits_named_are_those_of_the_configuration():
    known = set(Timers.__struct_fields__) | set(Limits.__struct_fields__) | set(NodeConfig.__struct_fields__)
    named = set(re.findall(r"`([a-z_]+(?:_s|_share|_limit|_attempts|_preempt|_requests|_tokens|_bytes))`", PAGE))
    assert len(named) > 20
    assert named <= known
