"""The decode role: reservations, ownership, pieces that come damaged or not at all."""

from array import array

import pytest

from kvferry.common.base.ids import Incarnation, RequestId, TransferKey
from kvferry.common.cluster.actions import ExpectPieces, ForgetPieces, Send
from kvferry.common.cluster.clients import ClientTable
from kvferry.common.cluster.events import PieceArrived, PieceBad
from kvferry.common.config.protocol import Timers
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.protocol.messages import (
    Abort,
    Commit,
    CommitRefused,
    Committed,
    Gone,
    Granted,
    Heartbeat,
    Piece,
    Refused,
    Reserve,
    Tokens,
    WantedRequest,
)
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SchedulerConfig
from kvferry.decode_node.role import DecodeRole
from tests.support.role_context import role_context

SELF_ID, PREFILL, WORKER = Incarnation("1" * 32), Incarnation("2" * 32), Incarnation("3" * 32)
REQUEST = RequestId("a" * 32)
LAYERS = 2


class Bench:
    """A decode role with one worker and one prefill node that said Hello."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.clients = ClientTable(Timers())
        self.worker = self.clients.hello(WORKER, "worker", "w", 0.0)
        self.prefill = self.clients.hello(PREFILL, "prefill", "p", 0.0)
        self.pool = BlockPool(num_blocks, 4, "m")
        self.role = DecodeRole(role_context(Scheduler(SchedulerConfig(), self.pool), self.clients))
        self.heartbeat_of_worker(0.0, as_of=0)

    def key(self, attempt: int = 1, generation: int = 1, request: RequestId = REQUEST) -> TransferKey:
        return TransferKey(request, attempt, generation, PREFILL, SELF_ID)

    def heartbeat_of_worker(self, now: float, *, as_of: int, attempts: tuple[int, ...] = (), expected: bool = False):
        entries = tuple(
            WantedRequest(request_id=REQUEST, attempt=attempt, next_index=0, expected=expected) for attempt in attempts
        )
        self.worker.update_wanted(
            Heartbeat(heartbeat_no=self.worker.heartbeat_no + 1, as_of=as_of, wanted=entries), now
        )
        return self.done(self.role.on_heartbeat(self.worker, now), now)

    def reserve(
        self,
        now: float = 0.1,
        *,
        placement_no: int = 1,
        key: TransferKey | None = None,
        priority: int = 3,
        staged: bool = False,
    ):
        message = self.message(key or self.key(), placement_no=placement_no, priority=priority, staged=staged)
        return self.done(self.role.on_message(self.prefill, message, now), now)

    def message(
        self, key: TransferKey, *, placement_no: int = 1, prompt: int = 6, priority: int = 3, staged: bool = False
    ) -> Reserve:
        return Reserve(
            key=key,
            transfer_no=1,
            placement_no=placement_no,
            worker=WORKER,
            spec=RequestSpec(
                model="m",
                prompt_token_ids=array("I", range(10, 10 + prompt)),
                output_token_ids=array("I"),
                sampling=SamplingParams(max_new_tokens=4),
                priority=priority,
            ),
            remaining_ms=60_000,
            waited_ms=0,
            staged=staged,
        )

    def commit(
        self, now: float = 0.2, pieces: int = 2, key: TransferKey | None = None, *, waiting: tuple[int, ...] = ()
    ):
        message = Commit(
            key=key or self.key(),
            num_pieces=pieces,
            first_token_pos=0,
            num_tokens=6,
            token_id=5,
            waiting=waiting,
        )
        return self.done(self.role.on_message(self.prefill, message, now), now)

    def piece(self, number: int) -> Piece:
        return Piece(
            key=self.key(),
            number=number,
            layer_start=number,
            layer_end=number + 1,
            token_start=0,
            token_end=6,
            num_bytes=1,
        )

    def arrives(self, number: int, now: float = 0.3):
        return self.done(self.role.on_event(PieceArrived(self.piece(number)), now), now)

    def damaged(self, number: int, now: float = 0.3):
        return self.done(self.role.on_event(PieceBad(self.key(), number, "checksum"), now), now)

    def done(self, actions, now: float):
        actions = [*actions, *self.role.flush(now)]
        self.role.check_invariants()
        self.role.context.scheduler.check_invariants()
        return actions


def said(actions, kind):
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


@pytest.fixture
def bench():
    return Bench()


@pytest.mark.rule(25, 29)
def test_a_request_is_owned_by_the_commit_and_runs_with_the_last_piece(bench):
    granted = bench.reserve()
    assert [type(action) for action in granted] == [ExpectPieces, Send]
    assert said(bench.commit(), Committed) == [Committed(key=bench.key(), complete=False)]
    assert bench.arrives(0) == []
    actions = bench.arrives(1)
    assert said(actions, Committed) == [Committed(key=bench.key(), complete=True)]
    assert any(isinstance(action, ForgetPieces) for action in actions)
    assert said(actions, Tokens)[0].entries[0].token_ids == (5,)  # rule 29: it starts with the prefill node's token


@pytest.mark.rule(24)
def test_a_commit_is_answered_the_same_each_time(bench):
    """Rule 24."""
    bench.reserve()
    bench.commit()
    assert said(bench.commit(0.7), Committed) == [Committed(key=bench.key(), complete=False)]
    bench.arrives(0)
    bench.arrives(1)
    assert said(bench.commit(1.2), Committed) == [Committed(key=bench.key(), complete=True)]


def test_a_piece_damaged_before_the_commit_is_asked_for_with_it(bench):
    """Rule 25: not after `piece_idle`, for the node knows by then what it lacks."""
    bench.reserve()
    bench.damaged(0)
    assert said(bench.commit(), Committed) == [Committed(key=bench.key(), complete=False, missing=(0,))]
    bench.arrives(1)
    assert said(bench.arrives(0), Committed)[0].complete


@pytest.mark.rule(25)
def test_each_damaged_piece_is_asked_for_once(bench):
    bench.reserve()
    bench.commit()
    assert said(bench.damaged(0), Committed)[0].missing == (0,)
    assert said(bench.damaged(1), Committed)[0].missing == (1,)
    lost = bench.damaged(0, 0.5)
    assert said(lost, Gone)[0].reason == "lost"
    assert bench.pool.num_held == 0


def test_pieces_that_do_not_come_are_asked_for_once_then_the_request_is_lost(bench):
    bench.reserve()
    bench.commit(0.2)
    bench.arrives(0, 0.3)
    assert bench.role.tick(5.2) == []
    assert said(bench.role.tick(5.4), Committed)[0].missing == (1,)
    assert said(bench.done(bench.role.tick(10.5), 10.5), Gone)[0].reason == "lost"


@pytest.mark.rule(25)
def test_pieces_that_wait_at_the_sender_are_waited_for_as_long_as_it_says_so(bench):
    bench.reserve()
    bench.commit(0.2)
    bench.arrives(0, 0.3)
    for began in (0.3, 5.4, 10.5):
        assert bench.role.tick(began + 4.9) == []
        assert said(bench.role.tick(began + 5.1), Committed)[0].missing == (1,)
        assert said(bench.commit(began + 5.1, waiting=(1,)), Committed) == [Committed(key=bench.key(), complete=False)]
    assert said(bench.role.tick(20.8), Committed)[0].missing == (1,)
    assert said(bench.commit(20.8), Gone) == []  # an old copy of the Commit says nothing of what waits
    assert said(bench.done(bench.role.tick(26.0), 26.0), Gone)[0].reason == "lost"


@pytest.mark.rule(25)
def test_pieces_are_not_asked_of_a_sender_that_is_gone(bench):
    """Rule 25: its request is lost when no piece has come for as long as the sender's silence took."""
    bench.reserve()
    bench.commit(0.2)
    bench.arrives(0, 0.3)
    bench.clients.remove(PREFILL)
    assert bench.role.on_client_lost(bench.prefill, 3.2) == []
    assert bench.role.tick(3.2) == []
    assert said(bench.done(bench.role.tick(3.4), 3.4), Gone)[0].reason == "lost"
    assert bench.pool.num_held == 0


def test_a_piece_on_its_way_counts_although_its_sender_is_gone(bench):
    """Rule 25."""
    bench.reserve()
    bench.commit(0.2)
    bench.clients.remove(PREFILL)
    bench.arrives(0, 3.1)
    assert bench.role.tick(6.0) == []
    assert said(bench.arrives(1, 6.0), Tokens)


def test_a_damaged_piece_is_not_asked_of_a_sender_that_is_gone(bench):
    """Rule 25."""
    bench.reserve()
    bench.commit(0.2)
    bench.clients.remove(PREFILL)
    assert said(bench.damaged(0, 3.1), Gone)[0].reason == "lost"


@pytest.mark.rule(16)
def test_abort_never_touches_a_committed_request(bench):
    """Rule 16."""
    bench.reserve()
    bench.commit()
    assert bench.role.on_message(bench.prefill, Abort(key=bench.key()), 0.3) == []
    assert bench.pool.num_held == 2


@pytest.mark.rule(26)
def test_abort_gives_a_reservation_back(bench):
    bench.reserve()
    actions = bench.done(bench.role.on_message(bench.prefill, Abort(key=bench.key()), 0.3), 0.3)
    assert actions == [ForgetPieces(bench.key())]
    assert bench.pool.num_held == 0
    assert bench.role.is_quiescent()
    assert said(bench.commit(0.4), CommitRefused)


@pytest.mark.rule(13)
def test_a_late_reserve_of_a_plan_that_is_over_is_refused(bench):
    """Rule 13: no tombstones are kept, the list is newer and does not have it."""
    bench.heartbeat_of_worker(0.1, as_of=7)
    assert said(bench.reserve(0.2, placement_no=7), Refused) == [Refused(key=bench.key(), reason="gone")]
    assert said(bench.reserve(0.3, placement_no=8), Granted)


@pytest.mark.rule(27)
def test_a_worker_that_is_not_heard_gets_no_reservation(bench):
    """Rule 27."""
    assert said(bench.reserve(2.5), Refused)[0].reason == "no_worker_link"


@pytest.mark.rule(16)
def test_a_committed_request_goes_with_the_workers_list_only(bench):
    """Rule 16."""
    bench.reserve()
    bench.commit()
    bench.prefill.update_wanted(Heartbeat(heartbeat_no=1, as_of=99), 0.3)
    assert bench.done(bench.role.on_heartbeat(bench.prefill, 0.3), 0.3) == []
    assert bench.heartbeat_of_worker(0.4, as_of=1, attempts=(1,)) == []
    assert bench.heartbeat_of_worker(0.5, as_of=1) == [ForgetPieces(bench.key())]
    assert bench.role.is_quiescent()


def test_a_newer_reserve_of_the_attempt_replaces_the_older_one(bench):
    bench.reserve()
    newer = bench.reserve(0.2, key=bench.key(generation=2))
    assert newer[0] == ForgetPieces(bench.key())
    assert said(newer, Granted)[0].key.generation == 2
    assert said(bench.reserve(0.3), Refused)[0].reason == "gone"
    assert bench.pool.num_held == 2


def test_what_was_lost_is_reported_until_the_wanted_set_drops_it(bench):
    bench.reserve()
    bench.commit()
    bench.damaged(0)
    bench.damaged(0, 0.4)
    assert said(bench.heartbeat_of_worker(0.5, as_of=1, attempts=(1,), expected=True), Gone)[0].reason == "lost"
    assert said(bench.heartbeat_of_worker(1.0, as_of=1, attempts=(1,), expected=True), Gone)
    bench.heartbeat_of_worker(1.5, as_of=2)
    assert bench.role.is_quiescent()
