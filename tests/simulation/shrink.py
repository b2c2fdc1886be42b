"""Makes a failing schedule short: leaves out what it does not need to fail in the same way. Deterministic.

Deeds first, by delta debugging (Zeller and Hildebrandt 2002, ddmin); then hosts, network and damage; then each deed's
own numbers; over again until nothing more can go. A schedule fails in the same way when `Failure.kind` is the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import asdict, replace

from kvferry.ops.simulate.network import Delays
from tests.simulation.plan import Ask, Crash, Cut, Deed, Drain, Freeze, Misfit, Plan, Slow, Stall, Wedge
from tests.simulation.trial import Failure, try_plan

MAX_RUNS = 600


@dataclass(slots=True)
class Shrinker:
    """One failing schedule on its way. `fails` tells how a schedule fails, or None."""

    plan: Plan
    failure: Failure
    fails: Callable[[Plan], Failure | None] = try_plan
    max_runs: int = MAX_RUNS
    num_runs: int = 0
    _steps: tuple[Callable[[], bool], ...] = field(init=False)

    def __post_init__(self) -> None:
        self._steps = (self._fewer_deeds, self._simpler_world, self._simpler_deeds)

    def run(self) -> Plan:
        """The shortest that was found; `failure` is how it fails."""
        while self.num_runs < self.max_runs and sum(step() for step in self._steps):
            pass
        return self.plan

    def _take(self, plan: Plan) -> bool:
        """Go on from this one if it fails in the same way."""
        if self.num_runs >= self.max_runs or plan == self.plan:
            return False
        self.num_runs += 1
        failure = self.fails(plan)
        if failure is None or failure.kind != self.failure.kind:
            return False
        self.plan, self.failure = plan, failure
        return True

    def _fewer_deeds(self) -> bool:
        """Leave out parts of the deeds: halves first, single ones at last."""
        before, parts = len(self.plan.deeds), 2
        while self.plan.deeds and self.num_runs < self.max_runs:
            deeds = self.plan.deeds
            size = -(-len(deeds) // parts)
            starts = range(0, len(deeds), size)
            if any(self._take(replace(self.plan, deeds=deeds[:at] + deeds[at + size :])) for at in starts):
                parts = max(2, parts - 1)
            elif size == 1:
                break
            else:
                parts = min(len(deeds), 2 * parts)
        return len(self.plan.deeds) < before

    def _simpler_world(self) -> bool:
        return sum(self._take(plan) for plan in self._simpler_worlds()) > 0

    def _simpler_worlds(self) -> Iterator[Plan]:
        """Each from the plan as it is when its turn comes."""
        hosts = [spec.name for spec in self.plan.nodes] + [spec.name for spec in self.plan.workers]
        for host in hosts:
            yield _without(self.plan, host)
        yield replace(self.plan, delays=Delays())
        yield replace(self.plan, piece_delay_s=0.0005)
        yield replace(self.plan, damaged_share=0.0)
        yield replace(self.plan, static=True)

    def _simpler_deeds(self) -> bool:
        taken = 0
        for place in range(len(self.plan.deeds)):
            for name, values in _SIMPLER.get(type(self.plan.deeds[place]), {}).items():
                taken += any(self._take(self._with(place, name, value)) for value in values)
            if isinstance(deed := self.plan.deeds[place], Ask) and len(deed.prompt) > 1:
                halves = (deed.prompt[:1], deed.prompt[: len(deed.prompt) // 2])
                taken += any(self._take(self._with(place, "prompt", half)) for half in halves)
        return taken > 0

    def _with(self, place: int, name: str, value: object) -> Plan:
        """The plan with one number of one deed changed, if that makes it simpler."""
        deeds = list(self.plan.deeds)
        known: object = asdict(deeds[place])[name]
        simpler = not isinstance(known, int | float) or not isinstance(value, int | float) or value < known
        if simpler or name in ("timeout_s", "priority"):
            deeds[place] = replace(deeds[place], **{name: value})
        return replace(self.plan, deeds=tuple(deeds))


_SIMPLER: dict[type[Deed], dict[str, Sequence[object]]] = {
    Ask: {
        "max_new_tokens": (1, 2, 4, 8),
        "priority": (5,),
        "timeout_s": (20.0,),
        "poisoned": (False,),
        "kills": (False,),
    },
    Crash: {"after_actions": (0,), "restart_s": (0.05, 0.5)},
    Drain: {"restart_s": (0.05,)},
    Freeze: {"duration_s": (0.2, 1.2)},
    Stall: {"duration_s": (0.2, 1.2)},
    Misfit: {"duration_s": (0.2, 1.2)},
    Wedge: {"restart_s": (1.0,)},
    Cut: {"duration_s": (0.2, 1.2), "kv": (False,)},
    Slow: {"extra_s": (0.05,), "duration_s": (0.5,)},
}
"""What is tried for each kind of deed, simplest first."""


def _without(plan: Plan, host: str) -> Plan:
    """The plan without a host and all that befalls it; the plan itself when it cannot do without."""
    nodes = tuple(spec for spec in plan.nodes if spec.name != host)
    workers = tuple(spec for spec in plan.workers if spec.name != host)
    roles = {role for spec in nodes if spec.name not in plan.strangers for role in spec.roles}
    if not workers or roles != {"prefill", "decode"}:
        return plan
    deeds = tuple(deed for deed in plan.deeds if host not in asdict(deed).values())
    strangers = {name: field for name, field in plan.strangers.items() if name != host}
    return replace(plan, nodes=nodes, workers=workers, deeds=deeds, strangers=strangers)


def shrink(plan: Plan, failure: Failure) -> tuple[Plan, Failure]:
    """The short schedule, and how it fails."""
    shrinker = Shrinker(plan, failure)
    return shrinker.run(), shrinker.failure


def tell(plan: Plan) -> Iterator[str]:
    """A schedule in lines that a person can read."""
    hosts = [f"{spec.name} ({'+'.join(spec.roles)}, {spec.num_blocks} blocks)" for spec in plan.nodes]
    yield f"{', '.join(spec.name for spec in plan.workers)}; {', '.join(hosts)}; {plan.delays}"
    yield from (f"{name} is a stranger: {field}" for name, field in plan.strangers.items())
    for deed in plan.deeds:
        words = ", ".join(
            f"{name} {_short(value)}" for name, value in asdict(deed).items() if name not in ("at", "seed")
        )
        yield f"  {deed.at:7.3f} s  {type(deed).__name__}: {words}"


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"of {len(value)} ids" if isinstance(value, tuple) else str(value)
