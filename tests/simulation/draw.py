"""Generates a schedule from a seed and a profile. The same version and arguments give the same schedule."""

import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import RoleName
from kvferry.common.scheduling.sequence import SchedulerConfig
from kvferry.ops.simulate.costs import CostModel
from kvferry.ops.simulate.model import EOS_TOKEN_ID, VOCAB_SIZE
from kvferry.ops.simulate.network import Delays
from kvferry.ops.simulate.node import NodeSpec
from kvferry.ops.simulate.worker import WorkerSpec
from tests.simulation.draw_faults import NEAR_TIMERS_S, SHORT_S, WARM_UP_S, FaultGenerator
from tests.simulation.incompatible import INCOMPATIBLE_FIELDS, make_incompatible, with_two_kinds
from tests.simulation.profiles import PROFILES, Profile
from tests.simulation.schedule import Ask, Fault, Incompatible, Leave, Schedule, ScheduledEvent

TIMERS = Timers(node_drain_s=3.0, worker_drain_s=6.0, paused_reservation_s=0.2, migration_wait_s=4.0)
"""The default pauses are too long for the number of requests in a schedule."""
SHORT_WAITS = (
    "piece_idle_timeout_s",
    "commit_timeout_s",
    "queued_wait_s",
    "grant_idle_timeout_s",
    "reserve_timeout_s",
    "retain_s",
)
"""The timeouts that the profile `impatient` shortens."""
CONGESTED_BYTES_PER_S = (1e5, 2e5)
"""The KV transfer of one request takes 0.1 to 0.8 s."""
LARGE_PIECE_BYTES = 16_384
RETRY_TOKENS = 60
"""Enough for one to three requests."""
SWARM_FIELDS = ("leaving", "deadlines", "poisoned", "killers", "damaged", "blips", "partitions", "slow", "crashes",
                "freezes", "stalls", "wedges", "drains", "full", "preemption", "overload", "incompatible")  # fmt: skip


def draw_schedule(seed: int, profile_name: str, counts: tuple[int, int, int] | None = None) -> Schedule:
    """Generate a schedule. `counts`: numbers of workers, prefill nodes, decode nodes; random when None."""
    profile = PROFILES[profile_name]
    source = f"{profile.seed_name or profile_name}:{seed}"
    rng = random.Random(source)
    if profile.swarm:
        for name in SWARM_FIELDS:
            if rng.random() < 0.5:
                profile = replace(profile, **{name: 0.0})  # type: ignore[arg-type]
    # Separate generators, so that these choices do not change the rest of a schedule.
    separate = ("one-sided", "swap", "kinds", "impatient", "congested")
    one_sided, swap, kinds, impatient, congested = (random.Random(f"{what} {source}") for what in separate)
    generator = _Generator(rng, profile, one_sided, swap)
    generator.shorten_timeouts(impatient)
    generator.congest(congested)
    generator.two_kinds = counts is None and kinds.random() < profile.kinds
    return generator.schedule(seed, profile_name, counts)


_Extended = tuple[tuple[NodeSpec, ...], dict[str, str], list[Fault]]
"""Nodes, the incompatible ones among them with the field that differs, and replacements."""


class _Generator:
    """Generates one schedule."""

    def __init__(self, rng: random.Random, profile: Profile, one_sided: random.Random, swap_rng: random.Random) -> None:
        self.rng = rng
        self.one_sided = one_sided.random() < profile.one_sided
        slots = (2,) if profile.few_slots else (2, 3, 6, 12)
        self.staging_slots = one_sided.choice(slots) if self.one_sided else 0
        self.staging_slots_per_transfer = one_sided.choice((1, 2, 4))
        self.late_share = one_sided.choice((0.8,) if profile.few_slots else (0.0, 0.2, 0.7)) if self.one_sided else 0.0
        self.unconfirmed_share = one_sided.choice((0.0, 0.03, 0.2)) if self.one_sided else 0.0
        self.swap_rng = swap_rng
        self.swap = swap_rng.random() < profile.swap
        self.profile = profile
        self.full = rng.random() < profile.full
        self.preemption = rng.random() < profile.preemption
        self.overload = rng.random() < profile.overload
        self.both = rng.random() < profile.both
        self.mixed = not self.both and rng.random() < profile.mixed
        self.step_s = 0.15 if profile.slow_engine else rng.choice((0.008, 0.03, 0.06))
        self.poisoned: frozenset[int] = frozenset()
        self.killers: frozenset[int] = frozenset()
        """Seeds of requests."""
        self.two_kinds = False
        self.timers = TIMERS
        self.pieces_per_layer = 1
        """Pieces per layer of a full step; 0: pieces of LARGE_PIECE_BYTES; many small ones would often lose one."""
        self.kv_cuts: random.Random | None = None
        self.kv_bytes_per_s = rng.choice((2e8, 5e5))

    def shorten_timeouts(self, rng: random.Random) -> None:
        """Shorten some timeouts with the probability of the profile; the KV cuts use the same generator."""
        if rng.random() < self.profile.impatient:
            short = {name: rng.choice(SHORT_S) for name in SHORT_WAITS if rng.random() < 0.5}
            self.timers = msgspec.structs.replace(TIMERS, **short)
            self.kv_cuts = rng

    def congest(self, rng: random.Random) -> None:
        """With the probability of the profile, let pieces queue for longer than the timeout of their receiver."""
        if rng.random() < self.profile.congested:
            self.timers = msgspec.structs.replace(self.timers, piece_idle_timeout_s=rng.choice(SHORT_S))
            self.kv_bytes_per_s = rng.choice(CONGESTED_BYTES_PER_S)

    def schedule(self, seed: int, name: str, counts: tuple[int, int, int] | None) -> Schedule:
        rng, profile = self.rng, self.profile
        num_workers, num_prefill, num_decode = counts or (
            rng.choice((1, 1, 2)),
            rng.choice((1, 2)),
            rng.choice((1, 2, 3)),
        )
        if self.two_kinds:
            num_prefill, num_decode = max(2, num_prefill), max(2, num_decode)
        asks = list(self._asks([f"W{i}" for i in range(num_workers)]))
        faults = FaultGenerator(rng, profile, [ask.at for ask in asks], self.kv_cuts)
        self.poisoned = frozenset(ask.seed for ask in asks if ask.poisoned)
        self.killers = frozenset(ask.seed for ask in asks if ask.kills)
        limits = self._limits()
        workers = tuple(WorkerSpec(name=f"W{i}", timers=self.timers, limits=limits) for i in range(num_workers))
        roles: list[RoleName] = ["prefill" if i < num_prefill else "decode" for i in range(num_prefill + num_decode)]
        nodes = tuple(self._node(i, role, limits) for i, role in enumerate(roles))
        if self.two_kinds:
            nodes = with_two_kinds(nodes)
        nodes, incompatible, replacements = self._incompatible_nodes(nodes, faults)
        hosts = [spec.name for spec in workers] + [spec.name for spec in nodes]
        events: list[ScheduledEvent] = [
            *asks,
            *replacements,
            *self._leaves(asks),
            *faults.generate(hosts, [spec.name for spec in nodes]),
        ]
        return Schedule(
            seed,
            name,
            workers,
            nodes,
            self._delays(),
            rng.random() < 0.5,
            rng.choice((0.02, 0.2)) if rng.random() < profile.damaged else 0.0,
            self.late_share,
            self.unconfirmed_share,
            rng.choice((0.0005, 0.0005, 0.01, 0.05)) if profile.delays else 0.0005,
            tuple(sorted(events, key=lambda event: event.at)),
            incompatible,
        )

    def _limits(self) -> Limits:
        rng = self.rng
        self.pieces_per_layer = rng.choice((1, 1 if self.one_sided else 2, 0))  # one slot: one at a time
        limits = Limits(
            transfers_per_peer=rng.choice((1, 4)),
            retry_tokens_per_node=RETRY_TOKENS,
            staging_slots_per_transfer=self.staging_slots_per_transfer,
            max_attempts=self.profile.max_attempts,
        )
        if self.preemption:
            limits = msgspec.structs.replace(limits, max_preemptions=rng.choice((1, 3)))
        if self.overload:
            queued = {"queued_requests": rng.choice((2, 4)), "queued_tokens": rng.choice((60, 200))}
            limits = msgspec.structs.replace(limits, **queued)
        if self.overload or self.full:
            limits = msgspec.structs.replace(limits, queued_reservations=rng.choice((1, 3)))
        return limits

    def _node(self, number: int, role: RoleName, limits: Limits) -> NodeSpec:
        rng = self.rng
        blocks = rng.choice((40, 64, 96))
        both = self.both or (self.mixed and rng.random() < 0.5)
        decodes = role == "decode" or both
        if decodes and self.full:
            blocks = rng.choice((20, 26))
        if decodes and self.preemption:
            blocks = rng.choice((20, 24, 30))
        swaps = self.swap and decodes
        spec = NodeSpec(
            name=f"{role[0].upper()}{number}",
            staging_slots=self.staging_slots,
            roles=("prefill", "decode") if both else (role,),
            num_blocks=blocks,
            num_host_blocks=self.swap_rng.choice((6, 12, 40)) if swaps else 0,
            timers=self.timers,
            limits=limits,
            poisoned=self.poisoned,
            killers=self.killers,
            costs=CostModel(step_s=self.step_s, kv_bytes_per_s=self.kv_bytes_per_s),
            scheduler=SchedulerConfig(
                eos_token_ids=frozenset({EOS_TOKEN_ID}),
                max_step_tokens=8 if self.profile.slow_engine else rng.choice((8, 16, 48)),
                max_running=8,
                max_steps_in_flight=rng.choice((1, 1, 2)),
                max_preemptions=limits.max_preemptions,
                swap_wait_s=self.swap_rng.choice((0.2, 2.0)) if swaps else 2.0,
                reserved_share=1.0 if self.preemption else 0.5,
                watermark_blocks_share=0.02,
            ),
        )
        layer_bytes = spec.scheduler.max_step_tokens * spec.layer_token_bytes
        target = layer_bytes // self.pieces_per_layer if self.pieces_per_layer else LARGE_PIECE_BYTES
        return replace(spec, limits=msgspec.structs.replace(limits, piece_target_bytes=target))

    def _incompatible_nodes(self, nodes: tuple[NodeSpec, ...], faults: FaultGenerator) -> _Extended:
        """With the probability of the profile, add an incompatible node, or replace a node by one for a while."""
        rng = self.rng
        if rng.random() >= self.profile.incompatible:
            return nodes, {}, []
        field, single = rng.choice(INCOMPATIBLE_FIELDS), [spec.name for spec in nodes if len(spec.roles) == 1]
        if single and rng.random() < 0.6:  # a node with both roles is compatible with itself
            return nodes, {}, [Incompatible(faults.time(), rng.choice(single), field, rng.choice(NEAR_TIMERS_S))]
        extra = self._incompatible_node(rng.choice(nodes), len(nodes), field)
        return (*nodes, extra), {extra.name: field}, []

    def _incompatible_node(self, like: NodeSpec, number: int, field: str) -> NodeSpec:
        """Return a further node that differs from this one in one field."""
        role = self.rng.choice(like.roles)
        return make_incompatible(replace(like, name=f"{role[0].upper()}{number}", roles=(role,)), field)

    def _delays(self) -> Delays:
        rng = self.rng
        if not self.profile.delays:
            return Delays()
        return rng.choice(
            (
                Delays(),
                Delays(base_s=0.002, jitter_s=0.02),
                Delays(base_s=0.03, jitter_s=0.1),
                Delays(slow_share=0.1, slow_s=0.3),
                Delays(slow_share=0.05, slow_s=0.9),
            )
        )

    def _asks(self, workers: list[str]) -> Iterator[Ask]:
        rng, profile = self.rng, self.profile
        stems = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(24)) for _ in range(2)]
        for number in range(rng.randint(max(1, profile.requests // 2), profile.requests)):
            stem = rng.choice(stems)[: rng.choice((0, 0, 4, 8, 13, 24))]
            prompt = stem + tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 8, 16))))
            tight = rng.random() < profile.deadlines
            longest = (20, 40) if self.preemption else (1, 2, 8, 24)
            yield Ask(
                at=WARM_UP_S + profile.span_s * rng.random(),
                number=number,
                worker=rng.choice(workers),
                prompt=prompt,
                max_new_tokens=rng.randint(1, rng.choice(longest)),
                seed=rng.getrandbits(32) << 8 | number,
                priority=rng.choice((1, 3, 5, 5)),
                timeout_s=rng.choice((0.02, 0.1, 0.3, 1.0)) if tight else rng.choice((3.0, 8.0, 20.0)),
                poisoned=rng.random() < profile.poisoned,
                kills=rng.random() < profile.killers,
            )

    def _leaves(self, asks: list[Ask]) -> Iterator[Leave]:
        for ask in asks:
            if self.rng.random() < self.profile.leaving:
                yield Leave(ask.at + self.rng.choice((0.0, 0.02, 0.2, 1.0)) * self.rng.random(), ask.number)
