"""Which faults a schedule has, and how often. A rate is the mean number of faults per schedule. Plain data."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Bounds for generating schedules. The default has requests and no faults."""

    requests: int = 8
    span_s: float = 3.0
    """Length of the interval of requests and faults."""
    delays: bool = False
    leaving: float = 0.0
    """Share of clients that disconnect early."""
    deadlines: float = 0.0
    """Share of requests with a deadline that is often missed."""
    poisoned: float = 0.0
    """Share of requests whose sampling fails."""
    killers: float = 0.0
    """Share of requests whose decoding crashes the process."""
    damaged: float = 0.0
    """Share of schedules in which pieces arrive damaged."""
    blips: float = 0.0
    partitions: float = 0.0
    slow: float = 0.0
    crashes: float = 0.0
    freezes: float = 0.0
    stalls: float = 0.0
    wedges: float = 0.0
    drains: float = 0.0
    full: float = 0.0
    """Share of schedules with small decode pools."""
    preemption: float = 0.0
    """Share of schedules whose decode pools fill up while decoding."""
    swap: float = 0.0
    """Share of schedules whose decode nodes have host blocks for swapping."""
    overload: float = 0.0
    """Share of schedules with short queues and many requests."""
    both: float = 0.0
    """Share of schedules in which every node has both roles."""
    mixed: float = 0.0
    """Share of schedules in which some nodes have both roles and some one role."""
    max_attempts: int = 5
    """Consecutive losses that end a request."""
    slow_engine: bool = False
    """Steps are so slow and short that prompts queue."""
    incompatible: float = 0.0
    """Share of schedules with an incompatible node."""
    kinds: float = 0.0
    """Share of schedules in which every second node of a role has other weights under the same model name."""
    one_sided: float = 0.0
    """Share of schedules with one-sided writes into staging slots, some of them late or unconfirmed."""
    few_slots: bool = False
    """Two staging slots per node and mostly late writes: many land in a slot that was reused meanwhile."""
    impatient: float = 0.0
    """Share of schedules with short timeouts and frequent KV cuts."""
    congested: float = 0.0
    """Share of schedules in which KV links are slower than prefill computation, with short timeouts."""
    swarm: bool = False
    """Omit each kind of fault from half of the schedules, so that rare combinations occur (swarm testing)."""
    seed_name: str = ""
    """Seeds the generator instead of the name of the profile: a renamed profile keeps the schedules of its seeds."""


PROFILES: dict[str, Profile] = {
    "none": Profile(),
    "delays": Profile(delays=True),
    "blips": Profile(delays=True, blips=12, span_s=2.0),
    "partitions": Profile(delays=True, partitions=3, slow=0.5),
    "slow": Profile(requests=14, delays=True, slow=5),
    "crashes": Profile(delays=True, crashes=2),
    "crowded": Profile(requests=16, full=1.0, crashes=2, span_s=1.0),
    "freezes": Profile(delays=True, freezes=2, wedges=0.2),
    "full": Profile(requests=16, full=1.0, span_s=0.8, max_attempts=2),
    "leaving": Profile(delays=True, leaving=0.5),
    "deadlines": Profile(delays=True, deadlines=0.6, poisoned=0.1),
    "drain": Profile(delays=True, drains=2),
    "preemption": Profile(requests=12, preemption=1.0),
    "swap": Profile(requests=16, span_s=0.8, delays=True, leaving=0.1, blips=0.5, drains=0.3, preemption=1.0, swap=1.0),
    "overload": Profile(requests=24, overload=1.0, span_s=1.5),
    "both": Profile(delays=True, leaving=0.2, blips=2, crashes=1, drains=0.5, preemption=0.4, both=1.0),
    "mixed": Profile(delays=True, leaving=0.2, blips=2, crashes=1, drains=0.5, preemption=0.3, mixed=1.0),
    "pauses": Profile(requests=16, delays=True, slow_engine=True, span_s=1.0),
    "wedges": Profile(requests=12, wedges=1.5),
    "stalls": Profile(delays=True, leaving=0.2, stalls=2),
    "incompatible": Profile(delays=True, crashes=0.5, blips=1, incompatible=1.0, seed_name="strangers"),
    "kinds": Profile(delays=True, blips=2, crashes=2, drains=0.7, wedges=0.3, preemption=0.3, both=0.2, kinds=1.0),
    "killers": Profile(killers=0.15),
    "damage": Profile(delays=True, damaged=1.0),
    "impatient": Profile(requests=12, delays=True, leaving=0.2, stalls=1, crashes=0.3, full=0.3, impatient=1.0),
    "congested": Profile(requests=20, span_s=0.6, leaving=0.1, congested=1.0),
    "onesided": Profile(
        requests=30,
        span_s=8.0,
        delays=True,
        leaving=0.4,
        damaged=0.5,
        blips=3,
        partitions=0.5,
        crashes=3,
        freezes=1,
        one_sided=1.0,
    ),
    "late": Profile(requests=40, span_s=6.0, delays=True, crashes=6, leaving=0.1, one_sided=1.0, few_slots=True),
}
PROFILES["all"] = Profile(
    requests=10,
    delays=True,
    leaving=0.2,
    deadlines=0.2,
    poisoned=0.03,
    killers=0.02,
    damaged=0.5,
    blips=3,
    partitions=2,
    slow=0.5,
    crashes=2,
    freezes=1.5,
    stalls=1,
    wedges=0.1,
    drains=1,
    full=0.6,
    preemption=0.6,
    swap=0.5,
    overload=0.3,
    both=0.1,
    mixed=0.1,
    incompatible=0.15,
    kinds=0.1,
    one_sided=0.3,
    impatient=0.1,
    swarm=True,
)
PROFILES["quick"] = replace(PROFILES["all"], requests=5, span_s=2.0)
