"""Pieces of whatever was computed, in whatever steps: each token of each layer is in one, and none is too large."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.base.ids import Incarnation
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.messages import Piece
from kvferry.prefill_node.pieces import PiecePlan
from tests.support.kv_memory import key_between

KEY = key_between(Incarnation("a1" * 16), Incarnation("b2" * 16))
SHAPES = st.builds(KvShape, st.integers(1, 6), st.integers(1, 40))
CHUNKS = st.lists(st.integers(1, 30), min_size=1, max_size=4)
"""Numbers of tokens; the first may be what the prefix cache had."""


def layer_tokens(pieces: list[Piece]) -> Counter[tuple[int, int]]:
    """How often each token of each layer is carried."""
    return Counter(
        (layer, token)
        for piece in pieces
        for layer in range(piece.layer_start, piece.layer_end)
        for token in range(piece.token_start, piece.token_end)
    )


@pytest.mark.rule(20)
@given(SHAPES, CHUNKS, st.integers(0, 60), st.integers(1, 600), st.data())
def test_pieces_cover_each_token_of_each_layer_once_and_none_is_too_large(shape, chunks, first, target, data):
    plan = PiecePlan(shape, target, first)
    pieces: list[Piece] = []
    start = 0
    for number, num_tokens in enumerate(chunks):
        end = start + num_tokens
        done = (
            set() if number == 0 and data.draw(st.booleans()) else data.draw(st.sets(st.integers(1, shape.num_layers)))
        )
        for layers in [*sorted(done), shape.num_layers]:
            plan.progress(start, end, layers)
            if data.draw(st.booleans()):
                pieces += plan.cut(KEY)
            if data.draw(st.sampled_from((False, False, False, True))):
                plan.restart()
                pieces = []
        start = end
    pieces += plan.cut(KEY)

    positions = range(first, start)
    assert layer_tokens(pieces) == Counter((layer, token) for layer in range(shape.num_layers) for token in positions)
    assert all(piece.num_bytes <= max(target, shape.layer_token_bytes) for piece in pieces)
    assert all(piece.num_bytes == layer_tokens([piece]).total() * shape.layer_token_bytes for piece in pieces)
    assert [piece.number for piece in pieces] == list(range(len(plan)))
    assert plan.all_given(start) == (first <= start or not pieces)
    assert plan.cut(KEY) == []
    plan.check_invariants()


@given(SHAPES, st.integers(1, 30), st.integers(1, 600))
def test_a_layer_that_is_not_above_the_target_is_not_parted(shape, num_tokens, target):
    plan = PiecePlan(shape, max(target, num_tokens * shape.layer_token_bytes))
    plan.progress(0, num_tokens, shape.num_layers)
    assert {(piece.token_start, piece.token_end) for piece in plan.cut(KEY)} == {(0, num_tokens)}
