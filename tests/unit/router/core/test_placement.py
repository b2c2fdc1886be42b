"""The choice of nodes for a request: rule 4 and the penalty of rule 34."""

import msgspec
import pytest

from kvferry.common.base.ids import Incarnation
from kvferry.common.protocol.model_info import Compatibility
from kvferry.router.policy.placement import MAX_CANDIDATES, DecodeView, PrefillView, choose

P1, P2 = Incarnation("1" * 32), Incarnation("2" * 32)
D1, D2, D3, D4 = (Incarnation(digit * 32) for digit in "6789")


KIND = Compatibility(protocol_version=1, model="m", kv_dtype="f", kv_layout="l", block_size=4, num_layers=1)
OTHER = msgspec.structs.replace(KIND, kv_dtype="g")


def prefill(peer: Incarnation, waiting_tokens: int = 0, kind: Compatibility = KIND) -> PrefillView:
    return PrefillView(peer, "p", waiting_tokens, kind)


def decode(peer: Incarnation, free_blocks: int = 50, total_blocks: int = 100, kind: Compatibility = KIND) -> DecodeView:
    return DecodeView(peer, "d", free_blocks, total_blocks, kind)


@pytest.mark.rule(6)
def test_only_compatible_nodes_make_a_pair():
    prefills = [prefill(P1, 0, OTHER), prefill(P2, 9)]
    choice = choose(prefills, [decode(D1, 90, kind=OTHER), decode(D2)])
    assert choice is not None
    assert (choice.prefill, choice.decodes) == (P1, (D1,))
    choice = choose(prefills, [decode(D2), decode(D3)], avoid={(P2, D2)})
    assert choice is not None
    assert (choice.prefill, choice.decodes) == (P2, (D3, D2))
    assert choose(prefills[:1], [decode(D2)]) is None


def test_both_sides_are_needed():
    assert choose([], [decode(D1)]) is None
    assert choose([prefill(P1)], []) is None


def test_the_least_waiting_tokens_and_the_largest_free_share_of_blocks_win():
    choice = choose([prefill(P1, 9), prefill(P2, 8)], [decode(D1, 50, 100), decode(D2, 40, 50)])
    assert choice is not None
    assert (choice.prefill, choice.decodes) == (P2, (D2, D1))


@pytest.mark.rule(4)
def test_at_most_three_candidates_best_first():
    choice = choose([prefill(P1)], [decode(D1, 10), decode(D2, 40), decode(D3, 30), decode(D4, 20)])
    assert choice is not None
    assert choice.decodes == (D2, D3, D4)
    assert len(choice.decodes) == MAX_CANDIDATES


def test_ties_rotate_so_that_workers_do_not_all_choose_the_same_node():
    views = [decode(D1), decode(D2), decode(D3)]
    chosen = [choose([prefill(P1), prefill(P2)], views, rotation=rotation) for rotation in range(6)]
    assert {choice.decodes[0] for choice in chosen if choice} == {D1, D2, D3}
    assert {choice.prefill for choice in chosen if choice} == {P1, P2}


def test_a_failed_pair_is_avoided_with_another_decode_node_then_with_another_prefill_node():
    two = [decode(D1, 90), decode(D2, 10)]
    choice = choose([prefill(P1), prefill(P2, 9)], two, avoid={(P1, D1)})
    assert choice is not None
    assert (choice.prefill, choice.decodes) == (P1, (D2, D1))
    choice = choose([prefill(P1), prefill(P2, 9)], [decode(D1)], avoid={(P1, D1)})
    assert choice is not None
    assert choice.prefill == P2


def test_the_best_pair_is_chosen_when_all_have_failed():
    choice = choose([prefill(P1, 9), prefill(P2)], [decode(D1)], avoid={(P1, D1), (P2, D1)})
    assert choice is not None
    assert (choice.prefill, choice.decodes) == (P2, (D1,))


def test_a_node_that_has_not_reported_its_load_counts_as_full():
    choice = choose([prefill(P1)], [decode(D1, 0, 0), decode(D2, 1, 100)])
    assert choice is not None
    assert choice.decodes[0] == D2


@pytest.mark.rule(4)
def test_a_colocated_node_is_its_own_first_candidate():
    choice = choose([prefill(D1)], [decode(D1, 10), decode(D2, 90), decode(D3, 50)])
    assert choice is not None
    assert (choice.prefill, choice.decodes) == (D1, (D1, D2, D3))


def test_the_free_blocks_of_a_colocated_node_count():
    both = [prefill(D1), prefill(D2)]
    choice = choose(both, [decode(D1, 10), decode(D2, 90)])
    assert choice is not None
    assert (choice.prefill, choice.decodes) == (D2, (D2, D1))
    choice = choose([prefill(D2), prefill(P1)], [decode(D2, 90)])
    assert choice is not None
    assert choice.prefill == P1, "a prefill-only node does not use the blocks of the colocated one"
