"""Ranges of numbers in messages: checked once, where a message is decoded. Types only.

What a peer sends is used as an index, a length or a time without another look; so none is negative, and none so large
that arithmetic with it, or a loop over it, could harm the receiver.
"""

from typing import Annotated

from msgspec import Meta

Uint32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""Checksums."""
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""As wide as ids are on the wire."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""Numbers of things and running numbers: exact in every JSON parser, and far beyond what one life counts."""
Positions = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Tokens of one request, positions and indices of them."""
Pieces = Annotated[int, Meta(ge=0, le=2**20)]
"""Numbers of pieces of one hand-over: a receiver walks through them."""
Milliseconds = Annotated[int, Meta(ge=0, le=10**12)]
"""Up to thirty years."""
Priority = Annotated[int, Meta(ge=1, le=5)]
"""1 comes first."""
PositiveFloat = Annotated[float, Meta(gt=0)]
"""What is divided by."""
Probability = Annotated[float, Meta(gt=0, le=1)]
"""Of something that must not be impossible."""
Seed = Annotated[int, Meta(ge=0)]
"""Up to 2**64 - 1: a header with a larger number is not valid (JSON numbers beyond that are no integers there)."""
