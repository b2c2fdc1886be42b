"""Ranges of the numbers in messages, checked once, when a message is decoded. Types only.

A number from a peer is used as an index, a length or a time without another check. So none may be negative, and none so
large that arithmetic with it, or a loop over it, could harm the receiver.
"""

from typing import Annotated

from msgspec import Meta

Uint32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""A checksum."""
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""As wide as token ids are on the wire."""
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A count or a sequence number: exact in every JSON parser, and more than one process ever counts."""
Positions = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A number of tokens of one request, or a position among them."""
Pieces = Annotated[int, Meta(ge=0, le=2**20)]
"""A number of pieces of one KV transfer. Bounded because the receiver loops over them."""
Milliseconds = Annotated[int, Meta(ge=0, le=10**12)]
"""At most about thirty years."""
Priority = Annotated[int, Meta(ge=1, le=5)]
"""1 is the most urgent."""
PositiveFloat = Annotated[float, Meta(gt=0)]
"""A divisor."""
Probability = Annotated[float, Meta(gt=0, le=1)]
"""A probability; zero is not permitted."""
Seed = Annotated[int, Meta(ge=0)]
"""At most 2**64 - 1: decoding refuses a header with a larger number, which JSON integers here do not cover."""
