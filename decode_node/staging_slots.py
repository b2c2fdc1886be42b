"""Which staging slot of this node may be written by which hand-over: the receiver's book. Pure. Protocol rule 26.

A one-sided transport writes into memory of this process without asking, and a write may land late. So it gets slots,
never cache blocks, and a slot goes to the next hand-over only when no write of the one before can land any more:

FREE         no hand-over may write it
GRANTED      named in a Granted; its hand-over may write it, again and again, as pieces are copied from it
QUARANTINED  its hand-over ended while a write may be in progress: until the sender says `Abort(stopped)`, for which
             Revoke asks it; or until the transport has closed the session with a sender that is gone, and
             `quarantine_s` has passed since

After a Commit every write was confirmed, and pieces that are asked for again come in messages: such slots are free
immediately.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.actions import Action, CloseSession, Send
from kvferry.common.config.protocol import Timers
from kvferry.common.protocol.messages import Revoke


@dataclass(slots=True)
class _Quarantine:
    slots: tuple[int, ...]
    asked_at: float
    closed_at: float | None = None
    """When the session with the sender was closed."""


@dataclass(slots=True)
class StagingSlots:
    """The slots and their states. With no slots at all, every piece comes in a message."""

    num_slots: int
    per_transfer: int
    timers: Timers
    _free: list[int] = field(init=False)
    _granted: dict[TransferKey, tuple[int, ...]] = field(default_factory=dict)
    _quarantined: dict[TransferKey, _Quarantine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_slots))

    @property
    def num_granted(self) -> int:
        """Slots that hand-overs may write."""
        return sum(len(slots) for slots in self._granted.values())

    @property
    def num_quarantined(self) -> int:
        """Slots in quarantine."""
        return sum(len(quarantine.slots) for quarantine in self._quarantined.values())

    def grant(self, key: TransferKey) -> tuple[int, ...]:
        """Slots for a hand-over: the free ones, at most `per_transfer`. It may get none, and then sends in messages."""
        if key in self._granted:
            raise InvariantError(f"{key} has slots already")
        if key in self._quarantined:  # an old copy of its Reserve
            return ()
        slots = tuple(self._free[: self.per_transfer])
        del self._free[: self.per_transfer]
        if slots:
            self._granted[key] = slots
        return slots

    def of(self, key: TransferKey) -> tuple[int, ...]:
        """The slots that this hand-over may write."""
        return self._granted.get(key, ())

    def release(self, key: TransferKey, now: float, *, confirmed: bool) -> None:
        """The hand-over has ended. `confirmed`: no write is in progress or will come."""
        slots = self._granted.pop(key, ())
        if not slots:
            return
        if confirmed:
            self._free += slots
        else:
            self._quarantined[key] = _Quarantine(slots, asked_at=now)

    def on_stopped(self, key: TransferKey) -> None:
        """Its sender says that no write is in progress or will come."""
        quarantine = self._quarantined.pop(key, None)
        if quarantine is not None:
            self._free += quarantine.slots

    def on_session_closed(self, peer: Incarnation, now: float) -> None:
        """The transport begins no more writes of this incarnation; those in progress may still land for a while."""
        for key, quarantine in self._quarantined.items():
            if key.prefill == peer and quarantine.closed_at is None:
                quarantine.closed_at = now

    def tick(self, is_client: Callable[[Incarnation], bool], now: float) -> list[Action]:
        """Free slots whose quarantine is over; ask live senders, and have the sessions of others closed."""
        actions: list[Action] = []
        for key, quarantine in list(self._quarantined.items()):
            if quarantine.closed_at is not None and now - quarantine.closed_at > self.timers.quarantine_s:
                self.on_stopped(key)
            elif now - quarantine.asked_at >= self.timers.retransmit_s:
                quarantine.asked_at = now
                if is_client(key.prefill):
                    actions.append(Send(key.prefill, Revoke(key=key, reason="staging slots")))
                elif quarantine.closed_at is None:
                    actions.append(CloseSession(key.prefill))
        return actions

    def check_invariants(self) -> None:
        """Raises InvariantError unless each slot is in exactly one place."""
        resting = [slot for quarantine in self._quarantined.values() for slot in quarantine.slots]
        granted = [slot for slots in self._granted.values() for slot in slots]
        if sorted(self._free + granted + resting) != list(range(self.num_slots)):
            raise InvariantError(
                f"of {self.num_slots} staging slots {self._free} are free, {granted} and {resting} not"
            )
        if not self._granted.keys().isdisjoint(self._quarantined):
            raise InvariantError("a hand-over has slots and quarantined ones")
