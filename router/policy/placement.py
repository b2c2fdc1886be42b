"""Which nodes a request goes to, by published loads plus what this worker booked since. Pure; knows no messages.

The prefill node has the least waiting prompt tokens, not counting the request's own at the node that holds its KV. The
decode candidates have the most free blocks. A colocated node is its own first candidate, since that needs no KV
transfer; so its free blocks count too, after the waiting tokens. Only nodes with compatible KV make a pair, and a pair
that failed recently is avoided while there is another. Ties are broken by position, rotated by the placement number, so
that workers with the same view do not all choose the same node.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvferry.common.base.ids import Incarnation
from kvferry.common.protocol.model_info import Compatibility

MAX_CANDIDATES = 3


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill node that may get work."""

    incarnation: Incarnation
    name: str
    waiting_tokens: int
    """Published, plus those this worker booked since."""
    compatibility: Compatibility


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode node that may get work."""

    incarnation: Incarnation
    name: str
    free_blocks: int
    """Published, less those this worker booked since."""
    total_blocks: int
    compatibility: Compatibility


@dataclass(frozen=True, slots=True)
class Choice:
    """A prefill node and up to three decode candidates, best first."""

    prefill: Incarnation
    decodes: tuple[Incarnation, ...]


def choose(
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    *,
    avoid: Collection[tuple[Incarnation, Incarnation]] = (),
    rotation: int = 0,
    holder: Incarnation | None = None,
    held_tokens: int = 0,
) -> Choice | None:
    """The best pair and its alternatives; None if no two nodes make a pair.

    avoid: pairs that failed recently. rotation: rotates the order of equally good nodes.
    holder: the prefill node that holds the KV of the request's held_tokens, which it need not compute.
    """
    offset = {view.incarnation: (index + rotation) % len(prefills) for index, view in enumerate(prefills)}
    used = {view.incarnation: _used(view) for view in decodes}

    def cost(view: PrefillView) -> tuple[int, float, int]:
        saved = held_tokens if view.incarnation == holder else 0
        return (view.waiting_tokens - saved, used.get(view.incarnation, 0.0), offset[view.incarnation])

    ranked = sorted(prefills, key=cost)
    fallback: Choice | None = None
    for prefill in ranked:
        fitting = [view for view in decodes if view.compatibility == prefill.compatibility]
        if not fitting:
            continue
        order = _rank_decodes(fitting, prefill.incarnation, avoid, rotation)
        choice = Choice(prefill.incarnation, tuple(view.incarnation for view in order[:MAX_CANDIDATES]))
        if (prefill.incarnation, choice.decodes[0]) not in avoid:
            return choice
        fallback = fallback or choice
    return fallback


def _rank_decodes(
    decodes: Sequence[DecodeView],
    prefill: Incarnation,
    avoid: Collection[tuple[Incarnation, Incarnation]],
    rotation: int,
) -> list[DecodeView]:
    offset = {view.incarnation: (index + rotation) % len(decodes) for index, view in enumerate(decodes)}

    def rank(view: DecodeView) -> tuple[bool, bool, float, int]:
        avoided = (prefill, view.incarnation) in avoid
        return (avoided, view.incarnation != prefill, _used(view), offset[view.incarnation])

    return sorted(decodes, key=rank)


def _used(view: DecodeView) -> float:
    """Share of its blocks that are not free."""
    return 1.0 - view.free_blocks / max(1, view.total_blocks)
