"""KV that is retained for the next attempt: a router worker and a prefill node without a network between them.

Protocol rules 19, 22 and 27. The test speaks for the decode nodes and for a second prefill node, which never answers.
"""

import random
from array import array

import pytest

from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.events import LinkClosed, ProbeAnswered, Received, Tick
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import (
    Cancel,
    Commit,
    Envelope,
    HandoverFailed,
    Heartbeat,
    Job,
    NodeLoad,
    Refused,
    Reserve,
    RoleName,
    Status,
    Welcome,
)
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.router.core.request import RequestState
from kvferry.router.core.router_core import RouterCore
from tests.support.generate_request import generate_request
from tests.support.prefill_bench import DECODES, MODEL, WORKER, PrefillBench, request, said
from tests.support.role_context import COMPATIBILITY, SELF_ID

OTHER = Incarnation("7" * 32)
ENDPOINTS: dict[Incarnation, tuple[str, RoleName]] = {
    SELF_ID: ("p", "prefill"),
    DECODES[0]: ("d0", "decode"),
    DECODES[1]: ("d1", "decode"),
}
TIMERS = Timers()


class Pair:
    """A worker and a prefill node."""

    def __init__(self) -> None:
        self.prefill = PrefillBench()
        self.prefill.link_up()
        self.router = RouterCore("w", TIMERS, Limits(), random.Random(0))
        for peer, (endpoint, role) in ENDPOINTS.items():
            self.join(peer, endpoint, role)
        self.to_other: list[object] = []

    def join(self, peer: Incarnation, endpoint: str, role: RoleName, now: float = 0.0) -> None:
        """The worker has a link to this node."""
        self.router.add_static(endpoint, now)
        self.deliver(
            peer, endpoint, Welcome(name=endpoint, roles=(role,), model=MODEL, compatibility=COMPATIBILITY), now
        )

    def deliver(self, peer: Incarnation, endpoint: str, message, now: float) -> None:
        """A node says something to the worker."""
        self.follow(self.router.handle(Received(Envelope(peer, WORKER, message), endpoint), now), now)

    def follow(self, effects, now: float) -> list[object]:
        """What the worker says reaches the prefill node, and the answers the worker."""
        self.router.check_invariants()
        for effect in effects:
            if isinstance(effect, Send) and effect.peer == OTHER:
                self.to_other.append(effect.message)
            if isinstance(effect, Send) and effect.peer == SELF_ID:
                self.answer(self.prefill.deliver(WORKER, effect.message, now), now)
        return list(effects)

    def answer(self, actions, now: float) -> None:
        """What the prefill node says reaches the worker."""
        for action in actions:
            if isinstance(action, Send) and action.peer == WORKER:
                self.deliver(SELF_ID, "p", action.message, now)

    def refuse_everywhere(self, now: float) -> None:
        """No decode node has room for it."""
        for decode in DECODES:
            job = next(iter(self.prefill.role.jobs))
            assert job.sender is not None
            assert job.sender.key is not None
            self.answer(self.prefill.hear(decode, Refused(key=job.sender.key, reason="full"), now), now)

    def tick(self, now: float, *, load: NodeLoad | None = None, draining: bool = False) -> list[object]:
        """Everybody is heard, then time goes by at the worker and at the prefill node."""
        for peer, (endpoint, _) in ENDPOINTS.items():
            heard = Status(status_no=int(now * 1000), load=load or NodeLoad(), draining=draining and peer == SELF_ID)
            self.deliver(peer, endpoint, heard, now)
        effects = self.follow(self.router.handle(Tick(), now), now)
        self.answer(self.prefill.tick(now), now)
        return effects


@pytest.fixture
def pair():
    """A request whose prompt is computed and that no decode node took."""
    pair = Pair()
    pair.router.handle(Tick(), 0.0)
    asked = generate_request(
        request(1), "m", array("I", range(6)), SamplingParams(max_new_tokens=4), timeout_s=60.0, priority=3
    )
    pair.follow(pair.router.submit(asked, 0.1), 0.1)
    pair.answer(pair.prefill.step(0.2), 0.2)
    pair.refuse_everywhere(0.3)
    assert pair.router.requests[request(1)].state is RequestState.WAITING
    return pair


@pytest.mark.rule(22)
def test_the_next_attempt_at_the_holder_computes_nothing(pair):
    """Rules 19 and 22: the list keeps the KV there until the next plan takes it over."""
    assert pair.prefill.pool.num_held == 2
    effects = pair.tick(0.45)
    job = said(effects, Job)[0]
    assert (job.attempt, list(job.spec.output_token_ids)) == (2, [50])
    assert pair.prefill.steps == []
    assert pair.prefill.pool.num_held == 2
    sender = next(iter(pair.prefill.role.jobs)).sender
    assert sender is not None
    (reserve,) = said(sender.on_peer_up(0.5), Reserve)
    assert said(pair.prefill.grant(reserve, 0.5), Commit)[0].token_id == 50


@pytest.mark.rule(22)
def test_what_is_held_outlives_lists_but_not_its_time(pair):
    """Rule 22: without another plan it is in the wanted set, unexpected, and released after retain_s."""
    pair.router.requests[request(1)].not_before = 99.0
    for turn in range(1, 17):
        heartbeats = said(pair.tick(0.6 * turn), Heartbeat)
        assert [(e.attempt, e.expected) for e in heartbeats[0].wanted] == [(1, False)]
        assert pair.prefill.pool.num_held == 2
    pair.tick(0.3 + TIMERS.retain_s + 0.1)
    assert pair.prefill.pool.num_held == 0


@pytest.mark.rule(22)
def test_planned_elsewhere_it_is_released_immediately(pair):
    pair.join(OTHER, "q", "prefill", 0.3)
    pair.deliver(SELF_ID, "p", Status(status_no=999, load=NodeLoad(waiting_tokens=50)), 0.4)
    pair.follow(pair.router.handle(Tick(), 0.45), 0.45)
    assert [type(message) for message in pair.to_other if not isinstance(message, Heartbeat)] == [Job]
    assert pair.prefill.pool.num_held == 0
    assert pair.prefill.role.is_quiescent()


@pytest.mark.rule(22)
def test_the_holder_is_taken_though_it_has_somewhat_more_waiting(pair):
    """Rule 22: what need not be computed there counts for it."""
    pair.join(OTHER, "q", "prefill", 0.3)
    pair.deliver(SELF_ID, "p", Status(status_no=999, load=NodeLoad(waiting_tokens=6)), 0.4)
    effects = pair.follow(pair.router.handle(Tick(), 0.45), 0.45)
    assert said(effects, Job)
    assert [message for message in pair.to_other if isinstance(message, Job)] == []


def test_a_client_that_leaves_frees_what_is_held(pair):
    effects = pair.follow(pair.router.cancel(request(1), "left", 0.35), 0.35)
    assert said(effects, Cancel)
    assert pair.prefill.role.is_quiescent()


def test_a_draining_holder_does_not_wait_for_a_plan_that_never_comes(pair):
    pair.router.requests[request(1)].not_before = 99.0
    pair.tick(0.7, draining=True)
    assert pair.prefill.role.is_quiescent()


def test_a_holder_that_dies_is_forgotten(pair):
    pair.follow(pair.router.handle(LinkClosed("p"), 0.4), 0.4)
    pair.follow(pair.router.handle(ProbeAnswered("p", "refused"), 0.4), 0.4)
    waiting = pair.router.requests[request(1)]
    assert (waiting.holder, waiting.losses) == (None, 0)


def test_nothing_is_held_when_the_node_says_so(pair):
    pair.tick(0.45)
    failed = HandoverFailed(request_id=request(1), attempt=2, reason="no_room", retained=False)
    pair.deliver(SELF_ID, "p", failed, 0.5)
    assert pair.router.requests[request(1)].holder is None
    assert pair.prefill.role.is_quiescent()
