"""What a checked token request is, and what its answers look like. Plain data and their JSON; no checks, no IO."""

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from kvferry.router.api import GenerateRequest

DATATYPE = "UINT32"
DEFAULT_OUTPUT_NAME = "output0"


@dataclass(frozen=True, slots=True)
class CheckedInfer:
    """A token request that broke no rule."""

    client_id: str
    """The id to answer with: the client's own, else one made by the router."""
    output_name: str
    request: GenerateRequest


def infer_answer(client_id: str, output_name: str, token_ids: Sequence[int]) -> bytes:
    """The JSON of a unary answer: generated ids alone, and no other key."""
    output = {"name": output_name, "shape": [1, len(token_ids)], "datatype": DATATYPE, "data": list(token_ids)}
    return orjson.dumps({"id": client_id, "outputs": [output]})
