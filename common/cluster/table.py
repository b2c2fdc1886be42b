"""Transition tables: one place that says what can happen to a thing in each of its states. Pure.

A pair that a table does not have raises, with the story of what came before: it is a bug, never a guess.
"""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from kvferry.common.base.errors import InvariantError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)

STORY_LENGTH = 24


class Table(Generic[S, E]):
    """An immutable map (state, event) -> next state, with a name for messages and diagrams."""

    def __init__(self, name: str, initial: S, rows: Mapping[tuple[S, E], S]) -> None:
        self.name = name
        self.initial = initial
        self.rows = dict(rows)

    def accepts(self, state: S, event: E) -> bool:
        """Whether the table has a row for the pair."""
        return (state, event) in self.rows


class Machine(Generic[S, E]):
    """One thing's state, moved only along the rows of its table."""

    __slots__ = ("_story", "label", "state", "table")

    def __init__(self, table: Table[S, E], label: str) -> None:
        self.table = table
        self.label = label
        self.state: S = table.initial
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)

    def accepts(self, event: E) -> bool:
        """Whether the event has a row in the present state."""
        return (self.state, event) in self.table.rows

    def move(self, event: E, now: float) -> S:
        """Go to the next state. Raises InvariantError when the table has no such row."""
        following = self.table.rows.get((self.state, event))
        if following is None:
            raise InvariantError(
                f"{self.table.name} {self.label}: no row for {event.name} in {self.state.name}; story: {self.story()}"
            )
        self._story.append(f"{now:.3f} {self.state.name} --{event.name}-> {following.name}")
        self.state = following
        return following

    def story(self) -> str:
        """The last moves, oldest first."""
        return "; ".join(self._story) or "(new)"
