"""Incompatible nodes: the fields in which they can differ from other nodes. Plain data."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvferry.ops.simulate.node import NodeSpec

_CHANGES: Mapping[str, Mapping[str, object]] = {
    "name": {"model_name": "another", "weights": "another"},
    "model": {"weights": "of another training"},
    "kv_dtype": {"kv_dtype": "other"},
    "block_size": {"block_size": 8},
    "num_layers": {"num_layers": 3},
}
INCOMPATIBLE_FIELDS = tuple(_CHANGES)
"""The name of the model, or a field of the compatibility tuple in Hello."""


def make_incompatible(spec: NodeSpec, field: str) -> NodeSpec:
    """Return the same node, but different in this field."""
    return replace(spec, **_CHANGES[field])  # type: ignore[arg-type]


def with_two_kinds(nodes: Iterable[NodeSpec]) -> tuple[NodeSpec, ...]:
    """Give every second node of each role other weights under the same name, unlike any incompatible node's."""
    numbers: Counter[tuple[str, ...]] = Counter()
    found = []
    for node in nodes:
        numbers[node.roles] += 1
        found.append(node if numbers[node.roles] % 2 else replace(node, weights="of the second kind"))
    return tuple(found)


def refused_field(field: str) -> str:
    """Return the field named by a refused Hello: another model has other weights, and Hello has no model name."""
    return "model" if field == "name" else field
