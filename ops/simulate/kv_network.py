"""What is between the ends of the simulated KV transport: delays, losses, late writes, and unconfirmed ones."""

import random
from dataclasses import dataclass, field

from kvferry.common.protocol.messages import Piece
from kvferry.ops.simulate.clock import EventLoop
from kvferry.ops.simulate.kv_receiver import KvReceiver

SEND_TIMEOUT_S = 5.0
"""The transport's: no write lands later than this after it began, and what did not get through by then has failed."""


@dataclass(slots=True)
class KvNetwork:
    """Which KV endpoints are there, and what is wrong between hosts."""

    loop: EventLoop
    rng: random.Random
    base_delay_s: float = 0.0005
    jitter_s: float = 0.001
    damaged_share: float = 0.0
    """Share of pieces whose bytes arrive wrong."""
    late_share: float = 0.0
    """Share of one-sided writes that land at any time within the transport's timeout."""
    unconfirmed_share: float = 0.0
    """Share of one-sided writes that land and are never confirmed."""
    receivers: dict[str, KvReceiver] = field(default_factory=dict)
    _cuts: dict[frozenset[str], float] = field(default_factory=dict)
    breaks: dict[frozenset[str], int] = field(default_factory=dict)
    """How often the connections between two hosts broke: what was under way then is lost."""
    num_lost: int = 0
    num_damaged: int = 0
    damaged_at: dict[str, float] = field(default_factory=dict)
    """By request_id: when a piece of it last arrived wrong."""
    num_writes: int = 0
    """One-sided ones that landed."""
    num_late: int = 0
    """Those of them that landed after their hand-over had ended at the receiver."""
    num_unconfirmed: int = 0

    def cut(self, host_a: str, host_b: str, duration_s: float) -> None:
        """Nothing passes between two hosts for this long; what is under way is lost."""
        pair = frozenset((host_a, host_b))
        self._cuts[pair] = max(self._cuts.get(pair, 0.0), self.loop.now() + duration_s)
        self.blip(host_a, host_b)

    def blip(self, host_a: str, host_b: str) -> None:
        """What is under way between two hosts is lost."""
        pair = frozenset((host_a, host_b))
        self.breaks[pair] = self.breaks.get(pair, 0) + 1

    def is_cut(self, host_a: str, host_b: str) -> bool:
        """Whether nothing passes now."""
        return self._cuts.get(frozenset((host_a, host_b)), 0.0) > self.loop.now()

    def num_breaks(self, host_a: str, host_b: str) -> int:
        """How often the connections between two hosts broke so far."""
        return self.breaks.get(frozenset((host_a, host_b)), 0)

    def is_lost(self, host_a: str, host_b: str, breaks_before: int) -> bool:
        """Whether something that was under way since then was lost."""
        lost = self.num_breaks(host_a, host_b) != breaks_before and self.rng.random() < 0.7
        self.num_lost += lost
        return lost

    def delay_s(self) -> float:
        """How long a piece is under way after it was read."""
        return self.base_delay_s + self.jitter_s * self.rng.random()

    def is_damaged(self, piece: Piece) -> bool:
        """Whether the bytes of this piece, which lands now, are wrong."""
        damaged = self.damaged_share > 0 and self.rng.random() < self.damaged_share
        if damaged:
            self.num_damaged += 1
            self.damaged_at[piece.key.request_id] = self.loop.now()
        return damaged

    def write_delay_s(self) -> float:
        """How long a one-sided write is under way."""
        if self.late_share > 0 and self.rng.random() < self.late_share:
            return SEND_TIMEOUT_S * self.rng.random()
        return self.delay_s()

    def is_confirmed(self) -> bool:
        """Whether the sender hears that a write has landed."""
        confirmed = self.unconfirmed_share == 0 or self.rng.random() >= self.unconfirmed_share
        self.num_unconfirmed += not confirmed
        return confirmed
