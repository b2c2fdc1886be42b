"""Nodes with other weights or smaller limits under one model name: which may continue which request."""

import random
from array import array

import pytest

from kvferry.common.base.errors import UnavailableError
from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.events import Received, Tick
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Envelope, FirstToken, Job, Status, Welcome, WrongIncarnation
from kvferry.common.protocol.model_info import Compatibility, ModelInfo
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.router.core.effects import Effect, FinishRequest
from kvferry.router.core.router_core import RouterCore
from tests.support.generate_request import generate_request

SELF_ID = Incarnation("f" * 32)
REQUEST = RequestId("a" * 32)
TIMERS = Timers(migration_wait_s=5.0)


class Bench:
    """A router worker, and colocated nodes that register one after the other."""

    def __init__(self) -> None:
        self.core = RouterCore("w", TIMERS, Limits(), random.Random(0))
        self.nodes: dict[str, Incarnation] = {}
        self.now = 0.0

    def node(self, name: str, weights: str = "old", dtype: str = "f", vocab_size: int = 8, length: int = 64) -> None:
        """A node registers, or the next incarnation at the same endpoint."""
        self.nodes[name] = peer = Incarnation(f"{len(self.nodes) + 1}{len(weights)}".ljust(32, "0"))
        self.core.add_static(name, self.now)
        model = ModelInfo(name="m", vocab_size=vocab_size, max_model_len=length, max_position_embeddings=length)
        kind = Compatibility(
            protocol_version=1, model=weights, kv_dtype=dtype, kv_layout="", block_size=4, num_layers=1
        )
        self.send(name, Welcome(name=name, roles=("prefill", "decode"), model=model, compatibility=kind))
        self.send(name, Status(status_no=1))
        assert self.core.links.by_peer[peer].usable

    def send(self, name: str, message: object) -> list[Effect]:
        envelope = Envelope(self.nodes[name], SELF_ID, message)  # type: ignore[arg-type]
        effects = self.core.handle(Received(envelope, name), self.now)
        self.core.check_invariants()
        return effects

    def die(self, name: str) -> list[Effect]:
        """Another incarnation is at the endpoint, and has not sent a Welcome."""
        peer = Incarnation("e" * 32)
        return self.core.handle(Received(Envelope(peer, SELF_ID, WrongIncarnation()), name), self.now)

    def submit(self, max_new_tokens: int = 4, ids: tuple[int, ...] = (1, 2, 3)) -> list[Effect]:
        sampling = SamplingParams(max_new_tokens=max_new_tokens)
        return self.core.submit(generate_request(REQUEST, "m", array("I", ids), sampling, timeout_s=60.0), self.now)

    def ticks(self, until: float) -> list[Effect]:
        effects: list[Effect] = []
        while self.now < until:
            self.now += 0.25
            for name, peer in self.nodes.items():
                if peer in self.core.links.by_peer:
                    effects += self.send(name, Status(status_no=int(self.now * 100)))
            effects += self.core.handle(Tick(), self.now)
        return effects


def jobs(effects: list[Effect]) -> list[Incarnation]:
    return [effect.peer for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Job)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def start(bench: Bench) -> None:
    """A request with one token from the node `old`."""
    bench.node("old")
    assert jobs(bench.submit()) == [bench.nodes["old"]]
    bench.send("old", FirstToken(request_id=REQUEST, attempt=1, index=0, token_id=5))


@pytest.mark.rule(32)
@pytest.mark.parametrize("other", [{"weights": "new"}, {"dtype": "g"}, {"vocab_size": 7}, {"length": 6}])
def test_a_stream_continues_only_on_nodes_that_compute_the_same_tokens(bench: Bench, other: dict[str, object]) -> None:
    """Rule 32."""
    start(bench)
    bench.node("new", **other)  # type: ignore[arg-type]
    assert jobs([*bench.die("old"), *bench.ticks(2.0)]) == []
    bench.node("again")
    assert jobs(bench.ticks(3.0)) == [bench.nodes["again"]]


@pytest.mark.rule(32)
def test_a_stream_whose_weights_are_gone_ends_with_that_reason(bench: Bench) -> None:
    start(bench)
    bench.node("new", weights="new")
    bench.die("old")
    ended = [effect.event for effect in bench.ticks(TIMERS.migration_wait_s + 1.0) if isinstance(effect, FinishRequest)]
    assert [type(event.error) for event in ended] == [UnavailableError]
    assert str(ended[0].error) == "no live node still serves the weights of 'm' that produced the first tokens"
    assert bench.core.is_quiescent()


def test_a_stream_waits_while_no_node_serves_its_model(bench: Bench) -> None:
    start(bench)
    bench.die("old")
    assert not [effect for effect in bench.ticks(TIMERS.migration_wait_s + 5.0) if isinstance(effect, FinishRequest)]
    bench.node("again")
    assert jobs(bench.ticks(bench.now + 1.0)) == [bench.nodes["again"]]


def test_a_request_without_a_token_accepts_any_weights(bench: Bench) -> None:
    bench.node("old")
    assert jobs(bench.submit()) == [bench.nodes["old"]]
    bench.node("new", weights="new")
    assert jobs([*bench.die("old"), *bench.ticks(1.0)]) == [bench.nodes["new"]]


def test_a_stream_that_cannot_continue_does_not_block_other_requests_of_its_model(bench: Bench) -> None:
    start(bench)
    bench.node("new", weights="new")
    bench.die("old")
    other = generate_request(RequestId("b" * 32), "m", array("I", [1]), SamplingParams(max_new_tokens=1))
    assert jobs(bench.core.submit(other, bench.now)) == [bench.nodes["new"]]
    assert jobs([*bench.die("new"), *bench.ticks(bench.now + 0.5)]) == []
    bench.node("newer", weights="new")
    assert jobs(bench.ticks(bench.now + 1.0)) == [bench.nodes["newer"]]


def test_a_request_is_checked_against_the_strictest_limits_of_live_nodes(bench: Bench) -> None:
    bench.node("wide", vocab_size=9, length=64)
    bench.node("short", vocab_size=10, length=32)
    assert (bench.core.models["m"].vocab_size, bench.core.models["m"].max_model_len) == (9, 32)
    bench.die("short")
    assert (bench.core.models["m"].vocab_size, bench.core.models["m"].max_model_len) == (9, 64)
    bench.die("wide")
    assert bench.core.models["m"].max_model_len == 64


def test_a_long_request_ends_when_only_nodes_with_lower_limits_are_left(bench: Bench) -> None:
    bench.node("wide")
    assert jobs(bench.submit(max_new_tokens=50)) == [bench.nodes["wide"]]
    bench.node("short", length=32)
    ended = [*bench.die("wide"), *bench.ticks(TIMERS.migration_wait_s + 1.0)]
    (end,) = [effect.event for effect in ended if isinstance(effect, FinishRequest)]
    assert str(end.error) == "no live pair of nodes takes a request of 53 tokens; all have lower limits"
