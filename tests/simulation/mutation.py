"""What a seeded defect is: one function of the cores replaced by a wrong one, for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

Patched = Callable[..., object]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One defect: `make` gets the right function and gives the wrong one."""

    name: str
    rule: str
    owner: type | ModuleType
    attribute: str
    make: Callable[[Patched], object]
    profile: str = "all"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The cores have the defect within."""
        right = self.owner.__dict__[self.attribute]
        setattr(self.owner, self.attribute, self.make(right))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, right)


def nothing(_: Patched) -> Patched:
    """Does nothing, and says that nothing is to be done."""
    return lambda *arguments, **named: []


def none(_: Patched) -> Patched:
    """Does nothing, and returns None."""
    return lambda *arguments, **named: None
