"""The router's requests: where each is wanted, and that only reports of the current attempt count."""

import random
from array import array

import pytest

from kvferry.common.base.errors import UnavailableError
from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.events import Received, Tick
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import (
    Cancel,
    Envelope,
    FirstToken,
    Gone,
    HandedOver,
    Heartbeat,
    Job,
    RoleName,
    Status,
    Tokens,
    TokensEntry,
    Welcome,
)
from kvferry.common.protocol.model_info import Compatibility, ModelInfo
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.router.core.effects import Deliver, FinishRequest
from kvferry.router.core.router_core import RouterCore
from tests.support.generate_request import generate_request

SELF_ID, PREFILL, DECODE = Incarnation("1" * 32), Incarnation("2" * 32), Incarnation("3" * 32)
REQUEST = RequestId("a" * 32)


class Bench:
    """A router worker with one prefill and one decode node, or with one colocated node."""

    def __init__(self, decode_block_size: int = 4, *, colocated: bool = False) -> None:
        self.core = RouterCore("w", Timers(), Limits(), random.Random(0))
        roles: tuple[tuple[Incarnation, RoleName], ...] = ((PREFILL, "prefill"), (DECODE, "decode"))
        for peer, role in roles[:1] if colocated else roles:
            self.core.add_static(role, 0.0)
            welcome = Welcome(
                name=role,
                roles=("prefill", "decode") if colocated else (role,),
                model=ModelInfo(name="m", vocab_size=8, max_model_len=1024, max_position_embeddings=1024),
                compatibility=Compatibility(
                    protocol_version=1,
                    model="m",
                    kv_dtype="f",
                    kv_layout="l",
                    block_size=decode_block_size if role == "decode" else 4,
                    num_layers=1,
                ),
            )
            self.receive(peer, role, welcome, 0.0)
            self.receive(peer, role, Status(status_no=1), 0.0)

    def receive(self, peer: Incarnation, endpoint: str, message, now: float):
        effects = self.core.handle(Received(Envelope(peer, SELF_ID, message), endpoint), now)
        self.core.check_invariants()
        return effects

    def submit(self, now: float = 0.1):
        asked = generate_request(REQUEST, "m", array("I", [1, 2, 3]), SamplingParams(max_new_tokens=4), timeout_s=30.0)
        return self.core.submit(asked, now)

    def hand_over(self, now: float = 0.2):
        return self.receive(PREFILL, "prefill", HandedOver(request_id=REQUEST, attempt=1, decode=DECODE), now)

    def tokens(self, seq: int, first: int, ids: tuple[int, ...], finish=None, attempt: int = 1, now: float = 0.3):
        entry = TokensEntry(request_id=REQUEST, attempt=attempt, first_index=first, token_ids=ids, finish=finish)
        return self.receive(DECODE, "decode", Tokens(link_seq=seq, entries=(entry,)), now)

    def wanted(self, now: float) -> dict[Incarnation, list[tuple[int, bool, bool]]]:
        """The wanted sets of the next heartbeats, by node: attempt, expected, resend."""
        heartbeats = sent(self.core.handle(Tick(), now), Heartbeat)
        return {
            peer: [(e.attempt, e.expected, e.resend) for e in heartbeat.wanted]
            for peer, heartbeat in heartbeats.items()
        }


def sent(effects, kind):
    return {
        effect.peer: effect.message
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, kind)
    }


def delivered(effects):
    return [token for effect in effects if isinstance(effect, Deliver) for token in effect.event.token_ids]


def ends(effects):
    return [effect.event for effect in effects if isinstance(effect, FinishRequest)]


@pytest.fixture
def bench():
    return Bench()


@pytest.mark.rule(12)
def test_a_request_is_wanted_at_the_prefill_node_until_the_decode_node_sends_tokens(bench):
    """Rule 12. Blocks are free within a second of an abort, since no node guesses how long pieces are needed."""
    assert sent(bench.submit(), Job)[PREFILL].attempt == 1
    assert bench.wanted(0.6) == {PREFILL: [(1, True, False)], DECODE: [(1, False, False)]}
    bench.hand_over()
    assert bench.wanted(1.1) == {PREFILL: [(1, False, False)], DECODE: [(1, True, False)]}
    bench.tokens(1, 0, (5,))
    assert bench.wanted(1.6) == {PREFILL: [], DECODE: [(1, True, False)]}


def test_a_cancel_goes_to_both_nodes_while_both_may_hold_blocks(bench):
    bench.submit()
    bench.hand_over()
    assert sent(bench.core.cancel(REQUEST, "left", 0.4), Cancel).keys() == {PREFILL, DECODE}


@pytest.mark.rule(29)
def test_each_index_is_delivered_once(bench):
    """Rule 29."""
    bench.submit()
    first = FirstToken(request_id=REQUEST, attempt=1, index=0, token_id=5)
    assert delivered(bench.receive(PREFILL, "prefill", first, 0.2)) == [5]
    bench.hand_over()
    assert delivered(bench.tokens(1, 0, (5, 6))) == [6]
    assert delivered(bench.tokens(2, 1, (6,))) == []


@pytest.mark.rule(29)
def test_a_gap_is_requested_again_with_the_next_heartbeat(bench):
    bench.submit()
    bench.hand_over()
    bench.wanted(0.6)
    assert delivered(bench.tokens(1, 1, (6,), now=0.7)) == []
    assert bench.wanted(0.75)[DECODE] == [(1, True, True)]
    assert delivered(bench.tokens(2, 0, (5, 6), now=0.8)) == [5, 6]


@pytest.mark.rule(3)
def test_reports_of_another_attempt_change_nothing(bench):
    """Rule 3."""
    bench.submit()
    bench.hand_over()
    assert bench.tokens(1, 0, (5, 6, 7, 8), finish="length", attempt=2) == []
    assert bench.core.requests[REQUEST].next_index == 0


@pytest.mark.rule(17, 31)
def test_a_lost_attempt_is_placed_again_with_its_tokens_and_its_age(bench):
    """Rules 31 and 35."""
    bench.submit(0.1)
    bench.hand_over()
    bench.tokens(1, 0, (5, 6))
    bench.receive(DECODE, "decode", Gone(request_id=REQUEST, attempt=1, reason="lost"), 2.0)
    bench.receive(PREFILL, "prefill", Status(status_no=2), 2.0)
    job = sent(bench.core.handle(Tick(), 2.2), Job)[PREFILL]
    assert (job.attempt, list(job.spec.output_token_ids), job.waited_ms) == (2, [5, 6], 2100)
    assert job.remaining_ms == 27_900


def test_cached_tokens_of_a_later_attempt_are_no_prefix_hit(bench):
    """They were computed by the request itself."""
    bench.submit(0.1)
    first = FirstToken(request_id=REQUEST, attempt=1, index=0, token_id=5, cached_tokens=1)
    bench.receive(PREFILL, "prefill", first, 0.2)
    bench.hand_over()
    bench.receive(DECODE, "decode", Gone(request_id=REQUEST, attempt=1, reason="lost"), 2.0)
    bench.receive(PREFILL, "prefill", Status(status_no=2), 2.0)
    bench.core.handle(Tick(), 2.2)
    again = FirstToken(request_id=REQUEST, attempt=2, index=1, token_id=6, cached_tokens=3, finish="stop")
    (end,) = ends(bench.receive(PREFILL, "prefill", again, 2.3))
    assert end.usage.cached_tokens == 1


# -- a colocated node


def test_a_colocated_node_is_its_own_candidate():
    job = sent(Bench(colocated=True).submit(), Job)[PREFILL]
    assert [candidate.incarnation for candidate in job.candidates] == [PREFILL]


def test_a_request_that_stays_at_a_colocated_node_is_expected_there_all_the_time():
    bench = Bench(colocated=True)
    bench.submit()
    assert bench.wanted(0.6) == {PREFILL: [(1, True, False)]}
    bench.receive(PREFILL, "prefill", HandedOver(request_id=REQUEST, attempt=1, decode=PREFILL), 0.7)
    assert bench.wanted(1.1) == {PREFILL: [(1, True, False)]}


@pytest.mark.parametrize("reported", [True, False])
def test_tokens_of_a_colocated_node_count_with_and_without_handed_over(reported):
    bench = Bench(colocated=True)
    bench.submit()
    if reported:
        bench.receive(PREFILL, "prefill", HandedOver(request_id=REQUEST, attempt=1, decode=PREFILL), 0.2)
    entry = TokensEntry(request_id=REQUEST, attempt=1, first_index=0, token_ids=(5, 6, 7, 8), finish="length")
    effects = bench.receive(PREFILL, "prefill", Tokens(link_seq=1, entries=(entry,)), 0.3)
    assert delivered(effects) == [5, 6, 7, 8]
    (end,) = ends(effects)
    assert (end.outcome, end.prefill_node, end.decode_node) == ("length", "prefill", "prefill")


@pytest.mark.rule(3)
def test_a_request_ends_once(bench):
    bench.submit()
    bench.hand_over()
    assert [end.outcome for end in ends(bench.tokens(1, 0, (5, 6, 7, 8), finish="length"))] == ["length"]
    assert bench.tokens(2, 0, (5, 6, 7, 8), finish="length") == []
    assert bench.core.cancel(REQUEST, "left", 0.5) == []
    assert bench.core.is_quiescent()


def test_a_request_times_out_at_its_deadline(bench):
    bench.submit(0.1)
    assert ends(bench.core.handle(Tick(), 30.0)) == []
    assert [end.outcome for end in ends(bench.core.handle(Tick(), 30.1))] == ["timeout"]


def test_deadlines_of_ended_requests_do_not_accumulate(bench):
    for number in range(2000):
        asked = generate_request(
            RequestId(f"{number:032x}"), "m", array("I", [1]), SamplingParams(max_new_tokens=4), timeout_s=600.0
        )
        bench.core.submit(asked, 0.1)
        bench.core.cancel(asked.request_id, "left", 0.1)
    assert len(bench.core._table._deadlines) < 600


def test_a_draining_worker_accepts_nothing_new_and_finishes_its_requests(bench):
    bench.submit()
    bench.core.drain(0.2)
    with pytest.raises(UnavailableError):
        bench.submit()
    bench.hand_over()
    assert ends(bench.tokens(1, 0, (5,), finish="stop"))
    assert all(heartbeat.last for heartbeat in sent(bench.core.close(0.5), Heartbeat).values())


@pytest.mark.rule(6)
def test_without_compatible_nodes_the_reason_names_the_difference():
    bench = Bench(decode_block_size=16)
    assert bench.core.not_ready_reason("m") == "no prefill node fits a decode node; block_size: 4 != 16"
    assert bench.core.placer.least_waiting_tokens("m") == 0
    assert bench.submit(0.1) == []
    for peer, endpoint in ((PREFILL, "prefill"), (DECODE, "decode")):
        bench.receive(peer, endpoint, Status(status_no=2), 1.0)
    (end,) = ends(bench.core.handle(Tick(), 2.1))
    assert "block_size: 4 != 16" in str(end.error)
    assert bench.core.is_quiescent()
