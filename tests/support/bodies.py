"""Bodies of requests to the token API."""

import json
from typing import Any


def body_of(token_ids: list[int], **parameters: Any) -> bytes:
    """A request body."""
    return json.dumps(
        {
            "inputs": [{"name": "input0", "shape": [1, len(token_ids)], "datatype": "UINT32", "data": token_ids}],
            "outputs": [{"name": "output0"}],
            "parameters": parameters,
        }
    ).encode()
