"""Nodes that do not fit others: what can be different about them. Plain data."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvferry.ops.simulate.node import NodeSpec

_STRANGE: Mapping[str, Mapping[str, object]] = {
    "name": {"model_name": "another", "weights": "another"},
    "model": {"weights": "of another training"},
    "kv_dtype": {"kv_dtype": "other"},
    "block_size": {"block_size": 8},
    "num_layers": {"num_layers": 3},
}
MISMATCHED_FIELDS = tuple(_STRANGE)
"""The name of the model, or a field of the tuple that Hello carries."""


def mismatched(spec: NodeSpec, field: str) -> NodeSpec:
    """The same node, but for this."""
    return replace(spec, **_STRANGE[field])  # type: ignore[arg-type]


def with_two_kinds(nodes: Iterable[NodeSpec]) -> tuple[NodeSpec, ...]:
    """Every other node of each role has other weights under the same name; not those of any incompatible node."""
    numbers: Counter[tuple[str, ...]] = Counter()
    found = []
    for node in nodes:
        numbers[node.roles] += 1
        found.append(node if numbers[node.roles] % 2 else replace(node, weights="of the second kind"))
    return tuple(found)


def refused_field(field: str) -> str:
    """What a refused Hello names: another model has other weights, and its name is no part of Hello."""
    return "model" if field == "name" else field
