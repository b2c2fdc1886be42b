"""Which pieces the KV of one hand-over is cut into: what is computed and not given to the transport yet. Pure.

Nothing here knows where pieces go. Numbers count from 0 for each transfer key, in the order of giving.
"""

from dataclasses import dataclass, field

from kvferry.common.errors import InvariantError
from kvferry.common.ids import TransferKey
from kvferry.common.protocol.messages import Piece


@dataclass(frozen=True, slots=True)
class KvShape:
    """What the size of a piece follows from."""

    num_layers: int
    layer_token_bytes: int
    """Bytes of one token in one layer, all cache tensors together."""

    def layers_per_piece(self, num_tokens: int, target_bytes: int) -> int:
        """How many layers make a piece of about the target."""
        return max(1, min(self.num_layers, target_bytes // max(1, num_tokens * self.layer_token_bytes)))

    def tokens_per_piece(self, target_bytes: int) -> int:
        """How many tokens of one layer make a piece of about the target."""
        return max(1, target_bytes // self.layer_token_bytes)


@dataclass(slots=True)
class _Region:
    """A computed range of positions: a chunk, or what the prefix cache had."""

    token_start: int
    token_end: int
    layers_done: int
    layers_sent: int = 0


@dataclass(slots=True)
class PiecePlan:
    """What is computed, and the pieces made of it for the present key."""

    shape: KvShape
    target_bytes: int
    first_token_pos: int = 0
    """Positions below it are not carried."""
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
        """Pieces of all that is computed and was not cut yet; a group of layers that may still grow waits."""
        return [piece for region in self._regions for piece in self._cut_region(key, region)]

    def numbered(self, numbers: set[int]) -> list[Piece]:
        """Those of the pieces so far that have these numbers."""
        return [piece for piece in self._pieces if piece.number in numbers]

    def all_given(self, num_tokens: int) -> bool:
        """Every position from the first lacked one on is covered, in every layer."""
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
        """Groups of layers; where one layer is above the target (a long cached prefix), parts of one layer."""
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
