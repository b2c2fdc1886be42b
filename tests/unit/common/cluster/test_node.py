"""A node's decisions that do not depend on its role."""

import pytest

from kvferry.common.base.ids import Incarnation, RequestId, TransferKey
from kvferry.common.cluster.actions import ExitProcess, Send
from kvferry.common.cluster.clients import ClientTable
from kvferry.common.cluster.events import DrainRequested, Received, Tick
from kvferry.common.cluster.node_core import NodeCore, NodeIdentity
from kvferry.common.config.protocol import Timers
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Commit,
    Envelope,
    Gone,
    Heartbeat,
    Hello,
    Reserve,
    WantedRequest,
    Welcome,
    WrongIncarnation,
)
from kvferry.common.protocol.model_info import Compatibility, ModelInfo
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SchedulerConfig

OTHER = Incarnation("3" * 32)
SELF_ID, WORKER = Incarnation("1" * 32), Incarnation("2" * 32)


class PrefillRole:
    """A role that has the role and holds nothing."""

    name = "prefill"

    def knows(self, request_id, attempt):
        return False

    def check_invariants(self):
        pass

    def __getattr__(self, name):
        return lambda *arguments: []


PREFILL_ROLE = (PrefillRole(),)


def make_core(roles=()) -> NodeCore:
    identity = NodeIdentity(
        SELF_ID,
        "n",
        ModelInfo(name="m", vocab_size=8, max_model_len=8, max_position_embeddings=8),
        Compatibility(
            protocol_version=PROTOCOL_VERSION, model="m", kv_dtype="f", kv_layout="l", block_size=4, num_layers=1
        ),
    )
    scheduler = Scheduler(SchedulerConfig(), BlockPool(8, 4, "m"))
    return NodeCore(identity, Timers(), scheduler, roles, ClientTable(Timers()))


def said(actions, kind):
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def test_time_before_its_first_tick_is_no_engine_stall():
    """The machine's clock does not begin with the process."""
    assert not [a for a in make_core().handle(Tick(), 1e6) if isinstance(a, ExitProcess)]


@pytest.mark.rule(6)
def test_a_client_that_never_said_hello_is_reported():
    core = make_core()
    core.handle(Tick(), 0.0)
    answer = core.handle(Received(Envelope(WORKER, SELF_ID, Heartbeat(heartbeat_no=1, as_of=0))), 0.1)
    assert said(answer, WrongIncarnation)
    assert said(core.handle(Received(Envelope(WORKER, Incarnation(""), Hello(kind="worker", name="w"))), 0.2), Welcome)
    assert not said(
        core.handle(Received(Envelope(WORKER, SELF_ID, Heartbeat(heartbeat_no=1, as_of=0))), 0.3), WrongIncarnation
    )
    core.check_invariants()


@pytest.mark.rule(1)
def test_a_message_to_an_earlier_life_is_answered_with_who_lives_here():
    core = make_core()
    core.handle(Received(Envelope(WORKER, Incarnation(""), Hello(kind="worker", name="w"))), 0.0)
    late = Envelope(WORKER, Incarnation("3" * 32), Heartbeat(heartbeat_no=9, as_of=9))
    assert said(core.handle(Received(late), 0.1), WrongIncarnation)
    assert core.clients.clients[WORKER].heartbeat_no == 0


def test_a_draining_node_with_nothing_left_ends():
    core = make_core()
    core.handle(Tick(), 0.0)
    core.handle(DrainRequested(), 0.1)
    assert [a.code for a in core.handle(Tick(), 0.2) if isinstance(a, ExitProcess)] == [0]


@pytest.mark.rule(14)
def test_what_a_returning_client_expects_may_have_been_here():
    """never_known has the same Job sent again; an attempt that got as far as a Commit must not be run a second time."""
    core = make_core(PREFILL_ROLE)
    hello = Received(Envelope(WORKER, Incarnation(""), Hello(kind="worker", name="w")))

    def answers(number: int, now: float) -> list[str]:
        entry = WantedRequest(request_id=RequestId("a" * 32), attempt=number, next_index=0, expected=True)
        heartbeat = Heartbeat(heartbeat_no=number, as_of=number, wanted=(entry,))
        return [gone.reason for gone in said(core.handle(Received(Envelope(WORKER, SELF_ID, heartbeat)), now), Gone)]

    core.handle(hello, 0.0)
    assert answers(1, 0.1) == ["never_known"]
    for tick in range(40):
        core.handle(Tick(), 0.1 * tick)
    assert WORKER not in core.clients.clients
    core.handle(hello, 4.1)
    assert answers(2, 4.2) == ["lost"]
    assert answers(3, 4.7) == ["never_known"]  # a Job that was lost on its way since
    core.check_invariants()


class Hears:
    """A role that notes what it is reported."""

    role = "decode"

    def __init__(self):
        self.heard = []

    def handles(self, message):
        return isinstance(message, Reserve | Commit | Abort)

    def on_message(self, client, message, now):
        self.heard.append(message)
        return []

    def __getattr__(self, name):
        return lambda *arguments: []


@pytest.mark.rule(2)
@pytest.mark.parametrize(
    ("prefill", "decode", "heard"), [(WORKER, SELF_ID, 1), (OTHER, SELF_ID, 0), (WORKER, OTHER, 0)]
)
def test_a_transfer_key_counts_only_from_and_to_the_incarnations_that_it_names(prefill, decode, heard):
    """Rule 2."""
    role = Hears()
    core = make_core([role])
    core.handle(Received(Envelope(WORKER, SELF_ID, Hello(kind="prefill", name="p"))), 0.0)
    core.handle(Received(Envelope(WORKER, SELF_ID, Abort(key=TransferKey(RequestId("r"), 1, 1, prefill, decode)))), 0.1)
    assert len(role.heard) == heard
