"""What is done to a cluster, drawn from a seed. Pure: the same seed gives the same faults."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What happens to a process or a link."""

    KILL = "kill"
    STOP = "stop"
    TERM = "term"
    CUT = "cut"
    CUT_ONE_WAY = "cut one way"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `other` is the far end of a cut link, "*" for all of them."""

    number: int
    gap_s: float
    """Since the one before."""
    kind: Kind
    target: str
    """A node's name, `worker` (any), `router` (gunicorn itself), `proxy`, or `launcher` (what started them)."""
    other: str = ""
    lasts_s: float = 0.0
    """Until a stopped process continues or a cut link heals."""

    def __str__(self) -> str:
        end = f" {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.number}: {self.kind.value} {self.target}{'/' + self.other if self.other else ''}{end}"


_WEIGHTS = {
    (Kind.KILL, "node"): 30,
    (Kind.STOP, "node"): 18,
    (Kind.TERM, "node"): 10,
    (Kind.CUT, "node"): 14,
    (Kind.CUT_ONE_WAY, "node"): 8,
    (Kind.KILL, "worker"): 5,
    (Kind.STOP, "worker"): 6,
    (Kind.TERM, "worker"): 3,
    (Kind.KILL, "router"): 1,
    (Kind.KILL, "proxy"): 3,
    (Kind.STOP, "proxy"): 2,
    (Kind.STOP, "launcher"): 3,
}
_BLIP_S, _LONG_S = (0.2, 1.4), (2.8, 6.0)
"""Shorter and longer than what it takes to be given up."""


def faults(seed: int, nodes: tuple[str, ...], mean_gap_s: float) -> Iterator[Fault]:
    """Endless."""
    rng = random.Random(f"faults-{seed}")
    number = 0
    while True:
        number += 1
        ((kind, victim),) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        target = rng.choice(nodes) if victim == "node" else victim
        other = ""
        if kind in (Kind.CUT, Kind.CUT_ONE_WAY):
            # Most cuts are of one link; some leave a node alone.
            other = rng.choice(
                ["*", "router", *(node for node in nodes if node.partition("-")[0] != target.partition("-")[0])]
            )
            if kind is Kind.CUT_ONE_WAY and other != "*" and rng.random() < 0.5:
                target, other = other, target
        lasts = rng.uniform(*(_BLIP_S if rng.random() < 0.4 else _LONG_S)) if kind in _LASTING else 0.0
        yield Fault(number, rng.uniform(0.4, 1.6) * mean_gap_s, kind, target, other, lasts)


_LASTING = (Kind.STOP, Kind.CUT, Kind.CUT_ONE_WAY)
