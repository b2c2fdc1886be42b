"""The network below the simulated KV transport: delays, losses, damage, late and unconfirmed writes. Seeded."""

import random
from dataclasses import dataclass, field

from kvferry.common.protocol.messages import Piece
from kvferry.ops.simulate.clock import EventLoop
from kvferry.ops.simulate.kv_receiver import KvReceiver

SEND_TIMEOUT_S = 5.0
"""Timeout of the transport: no write lands later than this after its start; a piece not sent by then has failed."""


@dataclass(slots=True)
class KvNetwork:
    """All KV endpoints, and the faults between hosts."""

    loop: EventLoop
    rng: random.Random
    base_delay_s: float = 0.0005
    jitter_s: float = 0.001
    damaged_share: float = 0.0
    """Share of pieces that arrive damaged."""
    late_share: float = 0.0
    """Share of one-sided writes that land at any time within the transport's timeout."""
    unconfirmed_share: float = 0.0
    """Share of one-sided writes that land without ever being confirmed."""
    receivers: dict[str, KvReceiver] = field(default_factory=dict)
    _cuts: dict[frozenset[str], float] = field(default_factory=dict)
    breaks: dict[frozenset[str], int] = field(default_factory=dict)
    """How often the connections between two hosts broke; pieces in flight at a break are lost."""
    num_lost: int = 0
    num_damaged: int = 0
    damaged_at: dict[str, float] = field(default_factory=dict)
    """Request id -> when a piece of it last arrived damaged."""
    num_writes: int = 0
    """One-sided writes that landed."""
    num_late: int = 0
    """One-sided writes that landed after their hand-over had ended at the receiver."""
    num_unconfirmed: int = 0

    def cut(self, host_a: str, host_b: str, duration_s: float) -> None:
        """Block all pieces between two hosts for this long; pieces in flight are lost."""
        pair = frozenset((host_a, host_b))
        self._cuts[pair] = max(self._cuts.get(pair, 0.0), self.loop.now() + duration_s)
        self.blip(host_a, host_b)

    def blip(self, host_a: str, host_b: str) -> None:
        """Lose the pieces in flight between two hosts."""
        pair = frozenset((host_a, host_b))
        self.breaks[pair] = self.breaks.get(pair, 0) + 1

    def is_cut(self, host_a: str, host_b: str) -> bool:
        return self._cuts.get(frozenset((host_a, host_b)), 0.0) > self.loop.now()

    def num_breaks(self, host_a: str, host_b: str) -> int:
        return self.breaks.get(frozenset((host_a, host_b)), 0)

    def is_lost(self, host_a: str, host_b: str, breaks_before: int) -> bool:
        """Whether a piece is lost that was sent when the number of breaks was `breaks_before`; counts it."""
        lost = self.num_breaks(host_a, host_b) != breaks_before and self.rng.random() < 0.7
        self.num_lost += lost
        return lost

    def delay_s(self) -> float:
        """Delay of a piece between its read and its arrival."""
        return self.base_delay_s + self.jitter_s * self.rng.random()

    def is_damaged(self, piece: Piece) -> bool:
        """Whether this piece, which arrives now, is damaged; counts it."""
        damaged = self.damaged_share > 0 and self.rng.random() < self.damaged_share
        if damaged:
            self.num_damaged += 1
            self.damaged_at[piece.key.request_id] = self.loop.now()
        return damaged

    def write_delay_s(self) -> float:
        """Delay of a one-sided write."""
        if self.late_share > 0 and self.rng.random() < self.late_share:
            return SEND_TIMEOUT_S * self.rng.random()
        return self.delay_s()

    def is_confirmed(self) -> bool:
        """Whether a write that has landed is confirmed to its sender; counts it if not."""
        confirmed = self.unconfirmed_share == 0 or self.rng.random() >= self.unconfirmed_share
        self.num_unconfirmed += not confirmed
        return confirmed
