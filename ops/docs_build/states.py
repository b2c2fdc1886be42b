"""The text of `ops/docs/states.md`, drawn from the transition tables themselves. A library: writes no file.

`python -m kvferry.ops.docs_build.protocol` writes the page.

The meaning of a state or an event is read from the source: the docstring below the member, or the line that begins with
its name in the docstring of its module.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvferry.common.cluster.links import LINK_TABLE
from kvferry.common.cluster.table import Table
from kvferry.common.scheduling.sequence import TRANSITIONS, SequenceStatus
from kvferry.decode_node.receive_table import RECEIVE_TABLE
from kvferry.prefill_node.handover_table import SEND_TABLE
from kvferry.prefill_node.job import JOB_TABLE
from kvferry.router.core.request import REQUEST_TABLE

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)

_HEAD = """\
# States

Made from the transition tables in the code by `python -m kvferry.ops.docs_build.protocol`; change those, not this page.

A machine changes state only along the rows of its table. A pair of state and event without a row is a bug and raises
`InvariantError` with the machine's last moves; late and duplicated messages are dropped before a table is asked. An
arrow to the end marks a state without a way out. [theory.md](theory.md) explains how the machines drive one another,
[protocol.md](protocol.md) the rules behind the moves.
"""


@dataclass(frozen=True, slots=True)
class StateDiagram:
    """One transition table and its texts."""

    title: str
    text: str
    states: type[Enum]
    events: type[Enum] | None
    """None: the table lists allowed successors without naming events."""
    starts: tuple[Enum, ...]
    rows: tuple[tuple[Enum, Enum | None, Enum], ...]
    """(state, event, next state)."""
    source: str
    """File that defines the states."""


def all_machines() -> tuple[StateDiagram, ...]:
    """Every table of the code, in the order in which a request meets them."""
    return (
        _machine(REQUEST_TABLE, "A request, at its router worker."),
        _machine(LINK_TABLE, "A link, at its client: a worker, or a prefill node towards decode nodes."),
        _machine(JOB_TABLE, "One attempt of a request, on the prefill node."),
        _machine(SEND_TABLE, "A hand-over, on the prefill node: asks candidates, pushes pieces, commits to one."),
        _machine(RECEIVE_TABLE, "A hand-over on the decode node, and its request until it ends."),
        _scheduler_machine(),
    )


def states_page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *(_section(machine) for machine in all_machines())])


def state_meanings(states: type[Enum]) -> dict[str, str]:
    """Name of a state -> its meaning, on one line; a state without a text is left out."""
    module = inspect.getmodule(states)
    text = (module.__doc__ if module is not None else None) or ""
    return _lines_by_name(text, set(states.__members__)) | texts_below(states)


def _machine(table: Table[S, E], text: str) -> StateDiagram:
    rows = tuple((state, event, following) for (state, event), following in table.rows.items())
    first_event = rows[0][1]
    title = table.name[0].upper() + table.name[1:]
    states = type(table.initial)
    return StateDiagram(title, text, states, type(first_event), (table.initial,), rows, _path_of(states))


def _scheduler_machine() -> StateDiagram:
    rows = tuple((state, None, to) for state in SequenceStatus for to in SequenceStatus if to in TRANSITIONS[state])
    reached = {to for _, _, to in rows}
    starts = tuple(state for state in SequenceStatus if state not in reached)
    text = "A sequence, in the scheduler of either node. `add` creates it as `WAITING`, `reserve` as `RESERVED`."
    return StateDiagram("Sequence", text, SequenceStatus, None, starts, rows, _path_of(SequenceStatus))


def _path_of(members: type[Enum]) -> str:
    return members.__module__.removeprefix("kvferry.").replace(".", "/") + ".py"


def _section(machine: StateDiagram) -> str:
    lines = [f"## {machine.title}\n\n{machine.text} The table is in `{machine.source}`.\n", "```mermaid"]
    lines += [*_diagram(machine), "```\n", "| state | meaning | transitions |\n| --- | --- | --- |"]
    texts = state_meanings(machine.states)
    lines += [f"| `{s.name}` | {texts.get(s.name, '')} | {_moves(machine, s)} |" for s in machine.states]
    lines.append("")
    if machine.events is not None:
        texts = texts_below(machine.events)
        lines.append("| event | meaning |\n| --- | --- |")
        lines += [f"| `{e.name}` | {texts.get(e.name, '')} |" for e in machine.events]
        lines.append("")
    return "\n".join(lines)


def _diagram(machine: StateDiagram) -> Iterator[str]:
    yield "stateDiagram-v2"
    for state in machine.starts:
        yield f"    [*] --> {state.name}"
    labels: dict[tuple[str, str], list[str]] = {}
    for state, event, following in machine.rows:
        labels.setdefault((state.name, following.name), []).append("" if event is None else event.name)
    for (name, following_name), names in labels.items():
        label = ", ".join(filter(None, names))
        yield f"    {name} --> {following_name}" + (f": {label}" if label else "")
    for state in machine.states:
        if not any(here is state and to is not state for here, _, to in machine.rows):
            yield f"    {state.name} --> [*]"


def _moves(machine: StateDiagram, state: Enum) -> str:
    reasons: dict[Enum, list[str]] = {}
    for here, event, to in machine.rows:
        if here is state:
            reasons.setdefault(to, []).extend([] if event is None else [event.name])
    return "; ".join(_move(state, to, names) for to, names in reasons.items()) or "-"


def _move(state: Enum, to: Enum, reasons: list[str]) -> str:
    where = "stays" if to is state else f"→ `{to.name}`"
    return f"{where} on {', '.join(reasons)}" if reasons else where


def _lines_by_name(text: str, names: set[str]) -> dict[str, str]:
    """`NAME   meaning` or `ONE, OTHER   meaning of both`, each with indented lines that continue it."""
    found: dict[str, str] = {}
    current: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        match = re.match(r"([A-Z_]+(?:, [A-Z_]+)*) +(\S.*)", line)
        if match is not None and names.issuperset(match[1].split(", ")):
            current = match[1].split(", ")
            found |= dict.fromkeys(current, match[2])
        elif line.startswith(" ") and current:
            found |= {name: f"{found[name]} {line.strip()}" for name in current}
        else:
            current = []
    return found


def texts_below(members: type[Enum]) -> dict[str, str]:
    """Name of a member -> the string literal below it, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(members))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        match statement, following:
            case ast.Assign(targets=[ast.Name(id=name)]), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts
