"""Transition tables: an unknown pair is a bug that carries its history."""

from enum import Enum, auto

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.cluster.table import STORY_LENGTH, Machine, Table


class Light(Enum):
    OFF = auto()
    ON = auto()


class Push(Enum):
    PRESS = auto()
    BREAK = auto()


TABLE = Table("light", Light.OFF, {(Light.OFF, Push.PRESS): Light.ON, (Light.ON, Push.PRESS): Light.OFF})


def test_it_moves_along_its_rows():
    machine = Machine(TABLE, "hall")
    assert machine.story() == "(new)"
    assert machine.move(Push.PRESS, 1.0) is Light.ON
    assert machine.move(Push.PRESS, 2.0) is Light.OFF
    assert machine.story() == "1.000 OFF --PRESS-> ON; 2.000 ON --PRESS-> OFF"


def test_an_unknown_pair_raises_with_the_story_and_changes_nothing():
    machine = Machine(TABLE, "hall")
    machine.move(Push.PRESS, 1.0)
    assert not machine.accepts(Push.BREAK)
    assert not TABLE.accepts(Light.ON, Push.BREAK)
    with pytest.raises(InvariantError, match=r"light hall: no row for BREAK in ON; story: 1\.000 OFF --PRESS-> ON"):
        machine.move(Push.BREAK, 2.0)
    assert machine.state is Light.ON
    assert machine.accepts(Push.PRESS)
    assert TABLE.accepts(Light.ON, Push.PRESS)


def test_the_story_is_short_however_long_the_life():
    machine = Machine(TABLE, "hall")
    for number in range(100):
        machine.move(Push.PRESS, float(number))
    assert machine.story().count(";") == STORY_LENGTH - 1
    assert machine.story().endswith("99.000 ON --PRESS-> OFF")


def test_a_table_does_not_follow_changes_of_what_it_was_made_from():
    rows = {(Light.OFF, Push.PRESS): Light.ON}
    table = Table("light", Light.OFF, rows)
    rows.clear()
    assert table.accepts(Light.OFF, Push.PRESS)
