"""Sequence: the transition table, numbers derived from the spec, the finish reason."""

import itertools

import pytest

from kvferry.common.base.errors import ConfigError, InvariantError
from kvferry.common.scheduling.sequence import TRANSITIONS, SchedulerConfig, Sequence, SequenceStatus
from tests.support.scheduling import ids, make_spec


def make(outputs=(), status=SequenceStatus.WAITING, **options) -> Sequence:
    spec = make_spec(3, outputs, **options)
    return Sequence(1, spec, status, ids(spec.token_ids))


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SequenceStatus, SequenceStatus)))
def test_move_allows_exactly_the_rows_of_the_table(old, new):
    seq = make(status=old)
    if new in TRANSITIONS[old]:
        seq.move(new)
        assert (seq.status, seq.history) == (new, [old])
    else:
        with pytest.raises(InvariantError, match=f"may not become {new.value}; it was .*{old.value}"):
            seq.move(new)
        assert seq.status is old


def test_every_status_can_end_and_ended_is_final():
    assert all(
        SequenceStatus.ENDED in TRANSITIONS[status] for status in SequenceStatus if status is not SequenceStatus.ENDED
    )
    assert not TRANSITIONS[SequenceStatus.ENDED]


def test_a_forbidden_move_raises_with_the_history():
    seq = make()
    seq.move(SequenceStatus.COMPUTING)
    seq.move(SequenceStatus.PREFILLED)
    with pytest.raises(InvariantError, match="waiting -> computing -> prefilled"):
        seq.move(SequenceStatus.RESERVED)


@pytest.mark.parametrize(
    ("outputs", "max_new", "to_start", "full_length"), [((), 1, 3, 3), ((), 2, 4, 4), ((), 9, 4, 11), ((7, 8), 3, 5, 5)]
)
def test_number_of_kv_positions(outputs, max_new, to_start, full_length):
    """The last output token needs no KV. The next token does, unless it is the last."""
    spec = make_spec(3, outputs, max_new_tokens=max_new)
    assert (spec.tokens_to_start, spec.max_kv_tokens) == (to_start, full_length)
    assert spec.is_retry == bool(outputs)


@pytest.mark.parametrize(
    ("outputs", "options", "expected"),
    [
        ((5,), {}, None),
        ((2,), {}, "stop"),
        ((5, 2, 5), {}, None),
        ((6,), {"stop_token_ids": (6,)}, "stop"),
        ((2,), {"ignore_eos": True}, None),
        ((6,), {"ignore_eos": True, "stop_token_ids": (6,)}, None),
        ((5, 5, 5, 5), {}, "length"),
        ((5, 5, 5, 2), {}, "stop"),
        ((5, 5, 5, 2), {"ignore_eos": True}, "length"),
    ],
)
def test_the_last_token_decides_the_finish_reason(outputs, options, expected):
    assert make(outputs, max_new_tokens=4, **options).finish_reason(frozenset({2})) == expected


@pytest.mark.parametrize("wrong", [
    {"max_step_tokens": 0}, {"max_running": 0}, {"max_steps_in_flight": 0}, {"max_running": 9, "max_step_tokens": 8},
    {"max_chunk_tokens": -1}, {"max_preemptions": -1}, {"aging_s": 0.0}, {"reserved_share": 0.0},
    {"reserved_share": 1.1}, {"watermark_blocks_share": 1.0}, {"watermark_blocks_share": -0.1},
])  # fmt: skip
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(ConfigError):
        SchedulerConfig(**wrong)
