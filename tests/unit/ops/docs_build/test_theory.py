"""The table of coupled states in the theory of operation names states that exist, in an order that the tables allow."""

from enum import Enum
from itertools import pairwise
from pathlib import Path

import pytest

from kvferry.common.scheduling.sequence import TRANSITIONS, SequenceStatus
from kvferry.decode_node.receive_table import RECEIVE_TABLE, ReceiveState
from kvferry.prefill_node.handover_table import SEND_TABLE, SendState
from kvferry.prefill_node.job import JOB_TABLE, JobState
from kvferry.router.core.request import REQUEST_TABLE, RequestState

PAGE = (Path(__file__).parents[4] / "ops" / "docs" / "theory.md").read_text(encoding="utf-8")
COLUMNS: tuple[tuple[str, type[Enum]], ...] = (
    ("request", RequestState),
    ("job", JobState),
    ("sequence, prefill", SequenceStatus),
    ("sending end", SendState),
    ("receiving end", ReceiveState),
    ("sequence, decode", SequenceStatus),
)


def moves() -> set[tuple[Enum, Enum]]:
    """Every (state, next state) that some table allows."""
    allowed: set[tuple[Enum, Enum]] = {(here, to) for here in SequenceStatus for to in TRANSITIONS[here]}
    for table in (REQUEST_TABLE, JOB_TABLE, SEND_TABLE, RECEIVE_TABLE):
        allowed |= {(here, to) for (here, _), to in table.rows.items()}
    return allowed


def column(number: int) -> list[str]:
    """The cells of a column of the table of coupled states, top to bottom."""
    head = f"| moment | {' | '.join(name for name, _ in COLUMNS)} |\n"
    lines = PAGE.partition(head)[2].partition("\n\n")[0].splitlines()[1:]
    assert len(lines) > 8
    return [line.strip("| ").split(" | ")[number + 1] for line in lines]


@pytest.mark.parametrize("number", range(len(COLUMNS)), ids=[name for name, _ in COLUMNS])
def test_a_column_names_states_in_an_order_that_its_table_allows(number: int):
    states = [COLUMNS[number][1][cell] for cell in column(number) if cell != "-"]
    steps = {(before, after) for before, after in pairwise(states) if before is not after}
    assert steps <= moves()
