"""The receiver's staging slots, by themselves and in the decode role: when another hand-over may write one."""

import pytest

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import Incarnation, RequestId, TransferKey
from kvferry.common.cluster.actions import CloseSession, ExpectPieces, Send
from kvferry.common.cluster.events import SessionClosed
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Abort, Cancel, Granted, Revoke
from kvferry.decode_node.role import DecodeRole
from kvferry.decode_node.staging_slots import StagingSlots
from tests.support.role_context import role_context
from tests.unit.decode_node.test_decode import PREFILL, REQUEST, SELF_ID, Bench, said

TIMERS = Timers()
OTHER = Incarnation("9" * 32)


def key(number: int, prefill: Incarnation = PREFILL) -> TransferKey:
    return TransferKey(RequestId(f"{number:032x}"), 1, 1, prefill, SELF_ID)


@pytest.fixture
def slots():
    slots = StagingSlots(num_slots=5, per_transfer=2, timers=TIMERS)
    yield slots
    slots.check_invariants()


def everybody(_: Incarnation) -> bool:
    return True


def no_client(_: Incarnation) -> bool:
    return False


def test_a_hand_over_gets_what_there_is_and_no_more_than_its_share(slots):
    assert [slots.grant(key(number)) for number in range(4)] == [(0, 1), (2, 3), (4,), ()]
    assert slots.of(key(1)) == (2, 3)
    assert slots.num_granted == 5


def test_confirmed_slots_are_free_immediately(slots):
    slots.grant(key(1))
    slots.release(key(1), 0.0, confirmed=True)
    assert (slots.num_granted, slots.num_quarantined) == (0, 0)


@pytest.mark.rule(26)
def test_unconfirmed_slots_rest_until_their_own_sender_has_stopped(slots):
    taken = slots.grant(key(1))
    slots.release(key(1), 0.0, confirmed=False)
    slots.on_stopped(key(2))
    assert slots.num_quarantined == 2
    assert not set(taken) & set(slots.grant(key(3)) + slots.grant(key(4)))
    slots.on_stopped(key(1))
    assert slots.grant(key(5)) == taken


def test_a_sender_that_lives_is_asked_until_it_answers_and_time_alone_frees_nothing(slots):
    slots.grant(key(1))
    slots.release(key(1), 0.0, confirmed=False)
    revoke = Send(PREFILL, Revoke(key=key(1), reason="staging slots"))
    assert slots.tick(everybody, 0.1) == []
    assert slots.tick(everybody, 0.6) == [revoke]
    assert slots.tick(everybody, 0.7) == []
    assert slots.tick(everybody, 100.0) == [revoke]
    assert slots.num_quarantined == 2


@pytest.mark.rule(26)
def test_after_a_sender_is_gone_slots_rest_from_the_end_of_its_session_on(slots):
    slots.grant(key(1))
    slots.release(key(1), 0.0, confirmed=False)
    assert slots.tick(no_client, 0.6) == [CloseSession(PREFILL)]
    assert slots.tick(no_client, 50.0) == [CloseSession(PREFILL)]  # not closed yet: asked again, and nothing is freed
    slots.on_session_closed(OTHER, 50.1)
    slots.on_session_closed(PREFILL, 51.0)
    assert slots.tick(no_client, 51.0 + TIMERS.quarantine_s) == []
    slots.on_session_closed(PREFILL, 56.0)  # reported twice: the first time counts
    assert slots.num_quarantined == 2
    slots.tick(no_client, 51.1 + TIMERS.quarantine_s)
    assert slots.num_quarantined == 0


def test_an_old_copy_of_a_reserve_gets_no_slots_while_those_of_its_key_rest(slots):
    slots.grant(key(1))
    slots.release(key(1), 0.0, confirmed=False)
    assert slots.grant(key(1)) == ()


def test_damage_is_seen(slots):
    slots.grant(key(1))
    with pytest.raises(InvariantError):
        slots.grant(key(1))
    slots._free.append(0)
    with pytest.raises(InvariantError):
        slots.check_invariants()
    slots._free.remove(0)
    slots._quarantined[key(1)] = slots._quarantined.pop(key(2), None) or _resting()
    with pytest.raises(InvariantError):
        slots.check_invariants()
    del slots._quarantined[key(1)]


def _resting():
    other = StagingSlots(num_slots=1, per_transfer=1, timers=TIMERS)
    other.grant(key(7))
    other.release(key(7), 0.0, confirmed=False)
    quarantine = other._quarantined[key(7)]
    quarantine.slots = ()
    return quarantine


# -- in the decode role


class StagedBench(Bench):
    """A decode role with staging slots."""

    def __init__(self) -> None:
        super().__init__()
        context = role_context(
            self.role.context.scheduler, self.clients, limits=Limits(staging_slots_per_transfer=4), num_staging_slots=8
        )
        self.role = DecodeRole(context)

    def reserve_staged(self, now: float = 0.1, *, staged: bool = True):
        return self.reserve(now, staged=staged)

    def hears(self, message, now: float):
        return self.done(self.role.on_message(self.prefill, message, now), now)


@pytest.fixture
def bench():
    return StagedBench()


def test_slots_are_named_in_granted_before_which_the_transport_knows_of_them(bench):
    actions = bench.reserve_staged()
    expected = next(action for action in actions if isinstance(action, ExpectPieces))
    assert said(actions, Granted)[0].slots == expected.slots == (0, 1, 2, 3)
    assert said(bench.reserve_staged(0.2), Granted)[0].slots == (0, 1, 2, 3)


def test_a_sender_that_cannot_write_them_gets_none(bench):
    assert said(bench.reserve_staged(staged=False), Granted)[0].slots == ()
    assert bench.role.staging.num_granted == 0


def test_after_the_commit_slots_are_free_when_the_last_piece_is_there(bench):
    bench.reserve_staged()
    bench.commit()
    bench.arrives(0)
    assert bench.role.staging.num_granted == 4
    bench.arrives(1)
    assert (bench.role.staging.num_granted, bench.role.staging.num_quarantined) == (0, 0)


def test_after_the_commit_slots_are_free_when_the_request_is_cancelled(bench):
    bench.reserve_staged()
    bench.commit()
    bench.done(bench.role.on_message(bench.worker, Cancel(request_id=REQUEST, attempt=1), 0.3), 0.3)
    assert (bench.role.staging.num_granted, bench.role.staging.num_quarantined) == (0, 0)


@pytest.mark.parametrize("stopped", [True, False])
def test_blocks_go_with_abort_and_slots_only_when_writing_has_stopped(bench, stopped):
    bench.reserve_staged()
    bench.hears(Abort(key=bench.key(), stopped=stopped), 0.2)
    assert bench.pool.num_held == 0
    assert bench.role.staging.num_quarantined == (0 if stopped else 4)
    bench.hears(Abort(key=bench.key()), 0.3)
    assert bench.role.staging.num_quarantined == 0


def test_a_request_that_its_worker_gave_up_leaves_slots_that_are_asked_for(bench):
    bench.reserve_staged()
    bench.done(bench.role.on_message(bench.worker, Cancel(request_id=REQUEST, attempt=1), 0.3), 0.3)
    assert bench.role.staging.num_quarantined == 4
    assert said(bench.done(bench.role.tick(1.0), 1.0), Revoke)[0].key == bench.key()


def test_a_silent_senders_session_is_closed_and_its_slots_come_back(bench):
    bench.reserve_staged()
    bench.clients.remove(PREFILL)
    bench.done(bench.role.on_client_lost(bench.prefill, 3.0), 3.0)
    assert CloseSession(PREFILL) in bench.done(bench.role.tick(4.0), 4.0)
    bench.done(bench.role.on_event(SessionClosed(PREFILL), 4.0), 4.0)
    bench.done(bench.role.tick(4.0 + TIMERS.quarantine_s), 10.0)
    assert bench.role.staging.num_quarantined == 4
    bench.done(bench.role.tick(4.1 + TIMERS.quarantine_s), 10.1)
    assert bench.role.staging.num_quarantined == 0
