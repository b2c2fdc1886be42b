"""The links between the parts of a cluster, and how they are cut: where each part runs, and who reaches whom.

`Links` is what the faults use. Two ways: `tests.chaos.namespaces` (packets vanish, one way if wanted) where the
kernel allows it, else `tests.chaos.fault_proxy` (connections of a node stall or are refused).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tests.chaos.launch import Place

CONTROL_PORT, KV_PORT = 7001, 7002


class Links(Protocol):
    """All links of a cluster. Parts are `router` and the nodes' names."""

    kind: str
    """In a report's words."""

    def places(self) -> dict[str, Place]:
        """Where every part runs."""
        ...

    def cut(self, one: str, other: str, *, one_way: bool) -> None:
        """Nothing passes any more, or nothing from `one` to `other`. `other` may be "*": everybody."""
        ...

    def heal(self, one: str, other: str) -> None:
        """It passes again."""
        ...

    def close(self) -> None:
        """Take everything down."""
        ...


class PlainLinks:
    """Links as they are; none can be cut."""

    kind = "plain"

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts

    def places(self) -> dict[str, Place]:
        return {}

    def cut(self, one: str, other: str, *, one_way: bool) -> None:
        raise NotImplementedError(f"nothing cuts {one} from {other}")

    def heal(self, one: str, other: str) -> None:
        raise NotImplementedError(f"{one} is not cut from {other}")

    def close(self) -> None:
        pass


def node_words(name: str, settings: Mapping[str, str]) -> tuple[str, ...]:
    """Settings of one node alone, as words behind its command."""
    role = name.partition("-")[0]
    return tuple(word for key, value in settings.items() for word in ("--set", f'{role}.{key}="{value}"'))


def parts_of(prefill: int, decode: int, colocated: int) -> tuple[str, ...]:
    """Everything that has links."""
    counts = {"prefill": prefill, "decode": decode, "colocated": colocated}
    return ("router", *(f"{role}-{n}" for role, count in counts.items() for n in range(count)))
