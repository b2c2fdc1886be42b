"""Version 2 of the protocol says what version 1 said, under the names of the field: the old golden frames, mapped to
the new names, are the new golden frames."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
OLD: dict[str, list[str]] = json.loads((FOLDER / "golden_v1.json").read_text())
NEW: dict[str, list[str]] = json.loads((FOLDER / "golden_v2.json").read_text())
MESSAGES = {"Beat": "Heartbeat", "OtherLife": "WrongIncarnation"}
KEYS = {"beat_no": "heartbeat_no", "plan_no": "placement_no", "held": "retained"}
SPEC_KEYS = ("model", "sampling", "priority", "times_preempted", "trace")
DROPPED = {"Commit": ("token_index",)}
"""Nothing read it: the index follows from the ids that the receiver has."""
VALUES = {"given_back": "preempted", "unsplit": "colocated"}
DEFAULTS = [("tensor_parallel", 1)]
"""Fields that were added within version 1, with the default that says nothing."""
ADDED: dict[str, dict[str, object]] = {
    "Reserve": {"spec": {"model": "smol"}},  # version 1 named the model in the Job alone
}


def mapped(name: str, header: dict[str, object]) -> dict[str, object]:
    """A version 1 header in the terms of version 2."""
    fields = {KEYS.get(key, key): value for key, value in header.items() if key not in DROPPED.get(name, ())}
    if "reason" in fields:
        fields["reason"] = VALUES.get(str(fields["reason"]), fields["reason"])
    if name == "Beat":
        fields["wanted"] = fields.pop("entries")
    if name in ("Job", "Reserve"):
        fields["spec"] = {key: fields.pop(key) for key in SPEC_KEYS if key in fields}
    if name == "Hello":
        fields["protocol_version"] = 2
    return merged(fields, ADDED.get(name, {}))


def merged(into: dict[str, object], extra: dict[str, object]) -> dict[str, object]:
    result = dict(into)
    for key, value in extra.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def without_additions(new: object, old: object) -> object:
    """The new value less the fields that were added with an empty or zero default, at every depth."""
    if isinstance(new, dict) and isinstance(old, dict):
        kept = {key: value for key, value in new.items() if key in old or (value and (key, value) not in DEFAULTS)}
        return {key: without_additions(value, old.get(key)) for key, value in kept.items()}
    return new


def test_every_message_of_version_1_is_one_of_version_2():
    assert {MESSAGES.get(name, name) for name in OLD} == set(NEW)


@pytest.mark.parametrize("name", sorted(OLD))
def test_the_content_is_the_same(name: str):
    old_head, old_header, *old_raw = (bytes.fromhex(frame) for frame in OLD[name])
    new_head, new_header, *new_raw = (bytes.fromhex(frame) for frame in NEW[MESSAGES.get(name, name)])
    assert (new_head[0], new_head[1]) == (2, old_head[1])
    assert new_raw == old_raw
    expected = mapped(name, json.loads(old_header))
    assert without_additions(json.loads(new_header), expected) == expected
