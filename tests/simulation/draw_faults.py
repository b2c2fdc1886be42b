"""Generates the faults of a schedule: kinds and rates from the profile, times close to those of its requests."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.simulation.profiles import Profile
from tests.simulation.schedule import Blip, Crash, Cut, Drain, Fault, Freeze, Slow, Stall, Wedge

WARM_UP_S = 0.7
"""Links are up by then, unless a fault prevents it."""
NEAR_TIMERS_S = (0.2, 0.6, 1.2, 2.0, 2.6, 2.8, 3.1, 4.5)
"""Durations of cuts and freezes: close to the timeouts of the protocol, where most bugs are found."""
KV_CUTS = 4
"""Upper bound of KV cuts in an impatient schedule."""
SHORT_S = (0.3, 0.6, 1.2)


@dataclass(frozen=True, slots=True)
class FaultGenerator:
    """Generates faults with the random numbers of one schedule."""

    rng: random.Random
    profile: Profile
    asked_at: Sequence[float]
    """Times of the requests."""
    kv_cuts: random.Random | None
    """Generator of KV cuts; None: no further KV cuts."""

    def _times(self, rate: float) -> Iterator[float]:
        for _ in range(int(rate * 2 * self.rng.random() + self.rng.random())):
            yield self.time()

    def time(self) -> float:
        """Return a time; half of the times are shortly after a request."""
        if self.rng.random() < 0.5:
            return self.rng.choice(self.asked_at) + 0.4 * self.rng.random() ** 2
        return WARM_UP_S + self.profile.span_s * self.rng.random()

    def _linked(self, hosts: list[str], kinds: str = "WPD") -> tuple[str, str]:
        """Return two hosts that have a connection, in either order."""
        pair = self.rng.sample(kinds, 2)
        first, second = (self.rng.choice([host for host in hosts if host.startswith(kind)]) for kind in pair)
        return first, second

    def generate(self, hosts: list[str], nodes: list[str]) -> Iterator[Fault]:
        """Yield the faults of a schedule between these hosts, some of which are nodes."""
        rng, profile = self.rng, self.profile
        for at in self._times(profile.blips):
            kv = rng.random() < 0.3
            host_a, host_b = self._linked(hosts, "PD" if kv else "WPD")
            yield Blip(at, host_a, host_b, kv)
        for at in self._times(profile.partitions):
            duration = rng.choice(NEAR_TIMERS_S) * (0.8 + 0.4 * rng.random())
            host_a, host_b = self._linked(hosts)
            yield Cut(at, host_a, host_b, duration, kv=False)
            if rng.random() < 0.3:
                yield Cut(at, host_b, host_a, duration, kv=False)
            if rng.random() < 0.3:
                yield Cut(at, *self._linked(hosts, "PD"), duration, kv=True)
        for at in self._times(profile.slow):
            yield Slow(at, rng.choice(hosts), rng.choice((0.05, 0.3, 0.9)), 0.5 + 3 * rng.random())
        for at in self._times(profile.crashes):
            yield Crash(at, rng.choice(hosts), rng.choice((0, 0, 1, 3, 10)), rng.choice((0.05, 0.5, 3.0)))
        for at in self._times(profile.freezes):
            yield Freeze(at, rng.choice(hosts), rng.choice(NEAR_TIMERS_S) * (0.8 + 0.4 * rng.random()))
        for at in self._times(profile.stalls):
            yield Stall(at, rng.choice(hosts), rng.choice(NEAR_TIMERS_S) * (0.8 + 0.4 * rng.random()))
        for at in self._times(profile.wedges):
            yield Wedge(at, rng.choice(nodes), rng.choice((1.0, 14.0, 60.0)))
        for at in self._times(profile.drains):
            yield Drain(at, rng.choice(hosts), rng.choice((0.05, 0.5)))
        yield from self._kv_cuts(hosts)

    def _kv_cuts(self, hosts: list[str]) -> Iterator[Fault]:
        """Cut KV connections shortly after a request, for about the length of a timeout."""
        rng = self.kv_cuts
        if rng is None:
            return
        for _ in range(rng.randint(1, KV_CUTS)):
            at = rng.choice(self.asked_at) + 0.2 * rng.random()
            prefill, decode = (rng.choice([host for host in hosts if host.startswith(kind)]) for kind in "PD")
            yield Cut(at, prefill, decode, rng.choice(SHORT_S) * (0.5 + 1.5 * rng.random()), kv=True)
