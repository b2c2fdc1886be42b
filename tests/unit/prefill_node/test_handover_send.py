"""The prefill node's end of a hand-over, by itself."""

from array import array
from dataclasses import dataclass, field

import pytest

from kvferry.common.base.ids import Incarnation, RequestId, TransferKey
from kvferry.common.cluster.actions import Action, Send, SendPiece, StopPieces
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.shape import KvShape
from kvferry.common.protocol.messages import Abort, Candidate, Commit, Committed, Granted, Job, Queued, Refused, Reserve
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.prefill_node.handover import HandoverContext, HandoverSender, NextToken
from kvferry.prefill_node.handover_table import SendState

SELF_ID, FIRST, SECOND = Incarnation("1" * 32), Incarnation("2" * 32), Incarnation("3" * 32)
TOKEN = NextToken(token_id=5, num_tokens=6, cached_tokens=0)


@dataclass
class Peers:
    """Every candidate may live, and can be written one-sided, unless it is named here."""

    dead: set[Incarnation] = field(default_factory=set)
    down: set[Incarnation] = field(default_factory=set)

    def may_live(self, candidate: Candidate) -> bool:
        return candidate.incarnation not in self.dead

    def is_up(self, peer: Incarnation) -> bool:
        return peer not in self.down

    def can_stage(self, peer: Incarnation) -> bool:
        return True


def make_sender(num_layers: int = 2, target_bytes: int = 6 * 1024) -> HandoverSender:
    """One layer of its six tokens makes a piece."""
    job = Job(
        request_id=RequestId("a" * 32),
        attempt=1,
        placement_no=1,
        spec=RequestSpec(
            model="m",
            prompt_token_ids=array("I", range(6)),
            output_token_ids=array("I"),
            sampling=SamplingParams(max_new_tokens=4),
            priority=3,
        ),
        remaining_ms=0,
        waited_ms=0,
        candidates=tuple(Candidate(incarnation=peer, name="d", endpoint="e") for peer in (FIRST, SECOND)),
    )
    numbers = iter(range(1, 100))
    context = HandoverContext(
        self_id=SELF_ID,
        shape=KvShape(num_layers, 1024),
        timers=Timers(),
        limits=Limits(piece_target_bytes=target_bytes),
        new_transfer_no=lambda: next(numbers),
        peers=Peers(),
    )
    return HandoverSender(
        context=context,
        job=job,
        worker=Incarnation("4" * 32),
        deadline=60.0,
        accepted_at=0.0,
        block_table=(),
        on_state=lambda state, now: [],
        on_reading=lambda reading: None,
    )


def grant(sender: HandoverSender, first_token: int, now: float, slots: tuple[int, ...] = ()) -> list[Action]:
    """The candidate that was asked grants the reservation."""
    return sender.on_answer(Granted(key=key_of(sender), first_token=first_token, slots=slots), now)


def pieces(actions):
    return [action.piece.number for action in actions if isinstance(action, SendPiece)]


def messages(actions, kind):
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def peers_of(sender: HandoverSender) -> Peers:
    assert isinstance(sender.context.peers, Peers)
    return sender.context.peers


def key_of(sender: HandoverSender) -> TransferKey:
    assert sender.key is not None
    return sender.key


def granted(sender: HandoverSender) -> HandoverSender:
    sender.ask(0.0)
    grant(sender, 0, 0.1)
    sender.give_slot(0.1)
    return sender


def committing() -> HandoverSender:
    sender = granted(make_sender())
    sender.progress(0, 6, 2, 0.2)
    sender.token_known(TOKEN, 0.2)
    assert sender.state is SendState.COMMITTING
    return sender


@pytest.mark.rule(24)
def test_commit_goes_out_when_every_layer_of_every_chunk_was_given():
    sender = granted(make_sender())
    assert pieces(sender.progress(0, 4, 1, 0.2)) == [0]
    assert pieces(sender.progress(0, 4, 2, 0.3)) == [1]
    assert pieces(sender.progress(4, 6, 1, 0.4)) == []  # two layers of so few tokens make a piece
    assert messages(sender.token_known(TOKEN, 0.5), Commit) == []
    last = sender.progress(4, 6, 2, 0.6)
    assert pieces(last) == [2]
    assert messages(last, Commit)[0].num_pieces == 3


@pytest.mark.rule(20)
def test_a_long_prefix_that_was_cached_goes_in_parts_of_a_layer():
    """One layer of it may be larger than any piece can be."""
    sender = granted(make_sender(target_bytes=4 * 1024))
    sender.token_known(TOKEN, 0.1)
    given = sender.progress(0, 6, 2, 0.2)
    parts = [action.piece for action in given if isinstance(action, SendPiece)]
    assert [(part.layer_start, part.layer_end, part.token_start, part.token_end, part.num_bytes) for part in parts] == [
        (0, 1, 0, 4, 4096),
        (0, 1, 4, 6, 2048),
        (1, 2, 0, 4, 4096),
        (1, 2, 4, 6, 2048),
    ]
    assert messages(given, Commit)[0].num_pieces == 4


def test_what_the_decode_node_has_is_not_sent():
    sender = make_sender()
    sender.ask(0.0)
    grant(sender, 4, 0.1)
    sender.give_slot(0.1)
    given = sender.progress(0, 6, 2, 0.2)
    assert {action.piece.token_start for action in given if isinstance(action, SendPiece)} == {4}


def test_a_refusal_before_the_commit_asks_the_next_one_as_a_new_generation():
    sender = granted(make_sender())
    sender.progress(0, 6, 2, 0.2)
    old = key_of(sender)
    actions = sender.on_answer(Refused(key=old, reason="full"), 0.3)
    assert StopPieces(old) in actions
    assert messages(actions, Abort) == [Abort(key=old)]
    assert messages(actions, Reserve)[0].key.decode == SECOND
    assert key_of(sender).generation == old.generation + 1
    late = sender.on_answer(Granted(key=old, first_token=0), 0.4)
    assert messages(late, Abort) == [Abort(key=old, stopped=False)]


@pytest.mark.rule(4)
def test_a_refusal_after_the_commit_ends_the_attempts_hand_over():
    """Rule 4: there is one target for the Commit, ever."""
    sender = committing()
    assert messages(sender.on_answer(Refused(key=key_of(sender), reason="not_reserved"), 0.4), Reserve) == []
    assert sender.state is SendState.FAILED
    assert sender.commit_sent


def ask_again(sender: HandoverSender, *missing: int) -> list[Action]:
    return sender.on_answer(Committed(key=key_of(sender), complete=False, missing=missing), 0.4)


@pytest.mark.rule(21)
def test_a_piece_that_the_transport_still_has_is_not_given_to_it_a_second_time():
    """Its blocks would be released when the first copy is read, and the second one would read another's KV."""
    sender = committing()
    again = ask_again(sender, 0, 1)
    assert pieces(again) == []
    assert [commit.waiting for commit in messages(again, Commit)] == [(0, 1)]
    assert sender.on_sent(key_of(sender), 0, 0.5) == []
    again = ask_again(sender, 0)
    assert pieces(again) == [0]  # it had gone out, and came to nothing
    assert [commit.waiting for commit in messages(again, Commit)] == [(0, 1)]
    assert sender.on_sent(key_of(sender), 1, 0.6) == []
    assert sender.is_reading
    assert sender.on_sent(key_of(sender), 0, 0.7) == []
    assert not sender.is_reading


def test_a_piece_is_given_a_second_time_and_no_third():
    sender = committing()
    for number in (0, 1):
        sender.on_sent(key_of(sender), number, 0.3)
    assert pieces(ask_again(sender, 1)) == [1]
    again = ask_again(sender, 1)
    assert pieces(again) == []
    assert [commit.waiting for commit in messages(again, Commit)] == [(1,)]  # it waits behind others
    sender.on_sent(key_of(sender), 1, 0.6)
    assert ask_again(sender, 1) == []


def test_a_piece_that_failed_the_second_time_is_not_given_again():
    sender = committing()
    for number in (0, 1):
        sender.on_sent(key_of(sender), number, 0.3)
    assert pieces(ask_again(sender, 1)) == [1]
    assert sender.on_send_failed(key_of(sender), 0.6) == [StopPieces(key_of(sender))]
    assert sender.on_stopped(key_of(sender), 0.7) == []
    assert ask_again(sender, 1) == []
    sender.check_invariants()


def test_what_the_transport_lost_after_the_commit_is_given_again_when_it_has_stopped():
    sender = committing()
    assert pieces(ask_again(sender, 1)) == []
    assert sender.on_send_failed(key_of(sender), 0.5) == [StopPieces(key_of(sender))]
    assert sender.on_send_failed(key_of(sender), 0.5) == []  # reported twice
    assert sender.on_sent(key_of(sender), 0, 0.5) == []
    assert pieces(ask_again(sender, 0)) == []
    sender.check_invariants()
    assert pieces(sender.on_stopped(key_of(sender), 0.7)) == [0, 1]
    assert sender.is_reading
    sender.check_invariants()


def test_what_failed_after_the_commit_is_not_given_again_unasked():
    sender = committing()
    ask_again(sender)
    assert sender.on_send_failed(key_of(sender), 0.5) == [StopPieces(key_of(sender))]
    assert sender.on_stopped(key_of(sender), 0.7) == []
    assert not sender.is_reading
    assert sender.on_send_failed(key_of(sender), 0.6) == []
    assert pieces(ask_again(sender, 1)) == [1]


def test_missing_pieces_are_sent_again_while_the_blocks_are_there():
    sender = committing()
    for number in (0, 1):
        sender.on_sent(key_of(sender), number, 0.3)
    assert pieces(ask_again(sender, 1)) == [1]
    sender.on_sent(key_of(sender), 1, 0.5)
    sender.forget_pieces()
    assert pieces(ask_again(sender, 1)) == []


def test_abort_stops_what_is_being_read_also_after_the_hand_over():
    sender = committing()
    sender.on_answer(Committed(key=key_of(sender), complete=False), 0.4)
    assert sender.is_reading
    assert sender.abort(0.5) == [StopPieces(key_of(sender))]
    assert sender.abort(0.6) == []
    sender.on_stopped(key_of(sender), 0.7)
    assert not sender.is_reading


@pytest.mark.rule(24)
def test_an_unanswered_commit_is_repeated_then_given_up():
    sender = committing()
    assert messages(sender.tick(0.3), Commit) == []
    assert len(messages(sender.tick(0.8), Commit)) == 1
    peers_of(sender).down.add(FIRST)
    assert messages(sender.tick(1.4), Commit) == []
    peers_of(sender).down.clear()
    sender.tick(5.3)
    assert (sender.state, sender.failure) == (SendState.FAILED, "commit_unanswered")


@pytest.mark.rule(27)
def test_no_candidate_left_is_no_room():
    sender = make_sender()
    sender.ask(0.0)
    sender.tick(1.1)
    assert key_of(sender).decode == SECOND
    sender.tick(2.2)
    assert (sender.state, sender.failure) == (SendState.FAILED, "no_room")
    sender.check_invariants()


@pytest.mark.rule(27)
def test_a_place_in_a_queue_is_given_up_for_another_candidate_and_not_for_none():
    """Who needs much would else never wait at the head of a queue for long enough."""
    sender = make_sender()
    sender.ask(0.0)
    sender.on_answer(Queued(key=key_of(sender)), 0.1)
    assert messages(sender.tick(5.1), Reserve)
    assert key_of(sender).decode == SECOND
    sender.on_answer(Queued(key=key_of(sender)), 5.2)
    asked = key_of(sender)
    assert [reserve.key for reserve in messages(sender.tick(30.0), Reserve)] == [asked]
    assert (sender.state, sender.key) == (SendState.QUEUED, asked)
    assert grant(sender, 0, 31.0) == []
    assert sender.state is SendState.GRANTED


@pytest.mark.rule(27)
def test_what_is_queued_is_asked_about_when_the_link_is_there_again():
    """The Granted may have been lost with the connection before."""
    sender = make_sender()
    sender.ask(0.0)
    sender.on_answer(Queued(key=key_of(sender)), 0.1)
    assert [reserve.key for reserve in messages(sender.on_peer_up(0.3), Reserve)] == [key_of(sender)]


@pytest.mark.rule(27)
def test_a_candidate_that_turns_out_to_be_gone_is_not_waited_for():
    sender = make_sender()
    sender.ask(0.0)
    assert sender.tick(0.1) == []
    peers_of(sender).dead.add(FIRST)
    assert messages(sender.tick(0.2), Reserve)
    assert key_of(sender).decode == SECOND


# -- staging slots


def staged(layers: int = 2) -> HandoverSender:
    sender = make_sender(layers)
    sender.ask(0.0)
    grant(sender, 0, 0.1, slots=(3, 4))
    sender.give_slot(0.1)
    return sender


def test_reserve_says_whether_staging_slots_can_be_written():
    sender = make_sender()
    (reserve,) = messages(sender.ask(0.0), Reserve)
    assert reserve.staged


@pytest.mark.rule(24)
def test_with_staging_slots_the_commit_waits_for_the_confirmation_of_every_write():
    sender = staged()
    given = sender.progress(0, 6, 2, 0.2)
    assert [action.slots for action in given if isinstance(action, SendPiece)] == [(3, 4), (3, 4)]
    assert messages(sender.token_known(TOKEN, 0.3), Commit) == []
    assert messages(sender.on_sent(key_of(sender), 0, 0.4), Commit) == []
    assert messages(sender.on_sent(key_of(sender), 1, 0.5), Commit)[0].num_pieces == 2
    sender.check_invariants()


def test_a_piece_that_is_asked_for_after_the_commit_goes_into_no_slot():
    sender = staged()
    sender.progress(0, 6, 2, 0.2)
    sender.token_known(TOKEN, 0.3)
    for number in (0, 1):
        sender.on_sent(key_of(sender), number, 0.4)
    again = sender.on_answer(Committed(key=key_of(sender), complete=False, missing=(1,)), 0.5)
    assert [(action.piece.number, action.slots) for action in again if isinstance(action, SendPiece)] == [(1, ())]
    assert messages(sender.on_sent(key_of(sender), 1, 0.6), Commit) == []


@pytest.mark.rule(26)
def test_abort_says_stopped_only_when_no_write_is_under_way():
    sender = staged()
    sender.progress(0, 6, 2, 0.2)
    old = key_of(sender)
    actions = sender.on_send_failed(old, 5.0)
    assert messages(actions, Abort) == [Abort(key=old, stopped=False)]
    assert StopPieces(old) in actions
    sender.check_invariants()
    assert sender.may_write(old)
    assert messages(sender.on_stopped(old, 0.7), Abort) == [Abort(key=old, stopped=True)]
    assert not sender.may_write(old)
    assert sender.on_stopped(old, 0.7) == []


def test_the_last_confirmation_of_what_was_given_up_says_stopped_too():
    sender = staged()
    sender.progress(0, 6, 2, 0.2)
    old = key_of(sender)
    sender.abort(0.3)
    assert sender.on_sent(old, 0, 0.4) == []
    assert messages(sender.on_sent(old, 1, 0.5), Abort) == [Abort(key=old, stopped=True)]


def test_what_is_given_up_with_nothing_under_way_has_stopped():
    sender = staged()
    assert messages(sender.abort(0.3), Abort) == [Abort(key=key_of(sender), stopped=True)]


def test_a_candidate_that_died_meanwhile_is_not_asked():
    sender = granted(make_sender())
    peers_of(sender).dead.add(SECOND)
    assert messages(sender.on_answer(Refused(key=key_of(sender), reason="full"), 0.3), Reserve) == []
    assert (sender.state, sender.failure) == (SendState.FAILED, "no_room")
