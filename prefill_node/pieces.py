"""Which pieces a hand-over's KV is cut into, and which of them the transport has. Pure; knows no peers and no bytes.

Pieces are numbered from 0 for each transfer key, in the order in which they are given. The transport has at most one
copy of a piece: with two, the blocks could be released when the first is read. Protocol rules 21 and 25.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import TransferKey
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.messages import Piece


@dataclass(slots=True)
class _Region:
    """A computed range of positions: a chunk, or the cached prefix."""

    token_start: int
    token_end: int
    layers_done: int
    layers_sent: int = 0


@dataclass(slots=True)
class PiecePlan:
    """The computed regions, and the pieces cut from them for the present key."""

    shape: KvShape
    target_bytes: int
    first_token_pos: int = 0
    """The receiver has the positions below it."""
    _regions: list[_Region] = field(default_factory=list)
    _pieces: list[Piece] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._pieces)

    def restart(self) -> None:
        """Another decode node gets everything again."""
        self._pieces = []
        for region in self._regions:
            region.layers_sent = 0

    def forget(self) -> None:
        """No piece can be sent again."""
        self._pieces = []

    def progress(self, token_start: int, token_end: int, layers: int) -> None:
        """Positions token_start .. token_end - 1 have KV in the first `layers` layers."""
        for region in self._regions:
            if region.token_start == token_start:
                region.token_end = token_end
                region.layers_done = max(region.layers_done, layers)
                return
        if token_end > token_start:
            self._regions.append(_Region(token_start, token_end, layers))

    def cut(self, key: TransferKey) -> list[Piece]:
        """Cut pieces from all that is computed and was not cut yet. A group of layers that may still grow waits."""
        return [piece for region in self._regions for piece in self._cut_region(key, region)]

    def numbered(self, numbers: set[int]) -> list[Piece]:
        """The pieces with these numbers."""
        return [piece for piece in self._pieces if piece.number in numbers]

    def all_given(self, num_tokens: int) -> bool:
        """Whether every position from the first that the receiver lacks is covered, in every layer."""
        covered = self.first_token_pos
        for region in sorted(self._regions, key=lambda r: r.token_start):
            if region.token_start <= covered:
                if region.token_end > self.first_token_pos and region.layers_sent < self.shape.num_layers:
                    return False
                covered = max(covered, region.token_end)
        return covered >= num_tokens

    def check_invariants(self) -> None:
        """Raises InvariantError when pieces are numbered wrongly."""
        if [piece.number for piece in self._pieces] != list(range(len(self._pieces))):
            raise InvariantError("pieces are not numbered from 0 on")

    def _cut_region(self, key: TransferKey, region: _Region) -> list[Piece]:
        """Cut groups of layers; where one layer is above the target (a long cached prefix), parts of one layer."""
        pieces: list[Piece] = []
        start = max(region.token_start, self.first_token_pos)
        if start >= region.token_end:
            region.layers_sent = region.layers_done
            return pieces
        group = self.shape.layers_per_piece(region.token_end - start, self.target_bytes)
        step = self.shape.tokens_per_piece(self.target_bytes)  # all of them where a layer is not above the target
        while region.layers_sent < region.layers_done:
            end = min(region.layers_sent + group, region.layers_done)
            if end - region.layers_sent < group and region.layers_done < self.shape.num_layers:
                break
            for at in range(start, region.token_end, step):
                pieces.append(self._new_piece(key, region.layers_sent, end, at, min(at + step, region.token_end)))
            region.layers_sent = end
        return pieces

    def _new_piece(self, key: TransferKey, layer_start: int, layer_end: int, token_start: int, token_end: int) -> Piece:
        piece = Piece(
            key=key,
            number=len(self._pieces),
            layer_start=layer_start,
            layer_end=layer_end,
            token_start=token_start,
            token_end=token_end,
            num_bytes=(layer_end - layer_start) * (token_end - token_start) * self.shape.layer_token_bytes,
        )
        self._pieces.append(piece)
        return piece


@dataclass(slots=True)
class _Pieces:
    """The pieces of one transfer key, by number."""

    out: set[int] = field(default_factory=set)
    """The transport has them."""
    wanted: set[int] = field(default_factory=set)
    """Asked for again, and not sent since."""
    again: set[int] = field(default_factory=set)
    """Given a second time. There is no third time."""
    stopping: bool = False
    """The transport failed and was asked to stop: it gets nothing before it has stopped."""


@dataclass(slots=True)
class PiecesOut:
    """By transfer key: a hand-over has one after the other, and pieces of an earlier one may still be read."""

    on_reading: Callable[[bool], None] = lambda _: None
    """Called when the transport begins (True) or ends to read blocks, over all keys."""
    _by_key: dict[TransferKey, _Pieces] = field(default_factory=dict)

    def __len__(self) -> int:
        """Pieces whose blocks may still be read."""
        return sum(len(pieces.out) for pieces in self._by_key.values())

    def __contains__(self, key: TransferKey) -> bool:
        return bool(self._of(key).out)

    @property
    def keys(self) -> list[TransferKey]:
        """Keys for which blocks may still be read."""
        return [key for key, pieces in self._by_key.items() if pieces.out]

    def give(self, key: TransferKey, number: int) -> None:
        """The transport gets this piece."""
        pieces, was_idle = self._of(key), not self
        pieces.out.add(number)
        if number in pieces.wanted:
            pieces.again.add(number)
        if was_idle:
            self.on_reading(True)

    def sent(self, key: TransferKey, number: int) -> bool:
        """Its blocks were read, which answers an earlier request for it. Returns whether it was the key's last."""
        pieces = self._of(key)
        if not pieces.out:
            return False
        pieces.out.discard(number)
        pieces.wanted.discard(number)
        if not self:
            self.on_reading(False)
        return not pieces.out

    def fail(self, key: TransferKey) -> bool:
        """The transport cannot send the pieces of this key. Returns whether it has to be stopped."""
        pieces = self._of(key)
        if not pieces.out or pieces.stopping:
            return False
        pieces.stopping = True
        return True

    def stopped(self, key: TransferKey) -> None:
        """The transport reads nothing more for this key."""
        pieces, was_reading = self._of(key), bool(self)
        pieces.out.clear()
        pieces.wanted -= pieces.again
        pieces.stopping = False
        if was_reading and not self:
            self.on_reading(False)

    def ask_again(self, key: TransferKey, numbers: Iterable[int]) -> None:
        """The receiver lacks these."""
        pieces = self._of(key)
        pieces.wanted.update(number for number in numbers if number in pieces.out or number not in pieces.again)

    def ready(self, key: TransferKey) -> set[int]:
        """Numbers to give again now: asked for, and not with the transport."""
        pieces = self._of(key)
        return set() if pieces.stopping else pieces.wanted - pieces.out

    def waiting(self, key: TransferKey) -> tuple[int, ...]:
        """Numbers that were asked for and are with the transport."""
        pieces = self._of(key)
        return tuple(sorted(pieces.wanted & pieces.out))

    def check_invariants(self) -> None:
        """Raises InvariantError when a piece could be given a third time."""
        for key, pieces in self._by_key.items():
            if third := (pieces.wanted & pieces.again) - pieces.out:
                raise InvariantError(f"{key}: pieces {sorted(third)} were given twice and are still wanted")

    def _of(self, key: TransferKey) -> _Pieces:
        return self._by_key.setdefault(key, _Pieces())
