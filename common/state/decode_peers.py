"""What the sender of a hand-over asks about decode nodes. A type only; `prefill_node/core/decode_links.py` answers."""

from typing import Protocol

from kvferry.common.ids import Incarnation
from kvferry.common.protocol.messages import Candidate


class DecodePeers(Protocol):
    """What is known of decode nodes."""

    def may_live(self, candidate: Candidate) -> bool:
        """False when another life, or none, is known to be at its address."""
        ...

    def can_stage(self, peer: Incarnation) -> bool:
        """Whether this life's staging slots can be written from here."""
        ...
