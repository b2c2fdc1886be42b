"""Seeded defects in the cores, one for a rule where one can be made: what the simulation must notice.

Each is a patch of one function, put on for a run and taken off again. `python -m tests.simulation.mutate` prints the
table. Nothing here is imported by the product.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvferry.common.base.ids import (
    Incarnation,
    TransferKey,
)
from kvferry.common.cluster.actions import (
    Action,
    Send,
)
from kvferry.common.cluster.clients import (
    Client,
    ClientTable,
)
from kvferry.common.cluster.links import LinkTable
from kvferry.common.cluster.node_core import NodeCore
from kvferry.common.kv.host_pool import HostPool
from kvferry.common.protocol.messages import Abort, Piece
from kvferry.common.scheduling.swapping import Swapping
from kvferry.decode_node.commit import CommitHandler
from kvferry.decode_node.entries import EntryTable
from kvferry.decode_node.receive_table import PieceLedger
from kvferry.decode_node.reservations import Reservations
from kvferry.decode_node.role import DecodeRole
from kvferry.decode_node.staging_slots import StagingSlots
from kvferry.ops.simulate.kv_link import KvSender
from kvferry.ops.simulate.kv_receiver import KvReceiver
from kvferry.prefill_node import job as reports
from kvferry.prefill_node.handover import HandoverSender
from kvferry.prefill_node.handover_table import SendState
from kvferry.prefill_node.jobs import JobTable
from kvferry.prefill_node.role import PrefillRole
from kvferry.prefill_node.transfer import HandoverManager, ReservationPauses
from kvferry.router.core.heartbeats import Heartbeats
from kvferry.router.core.node_reports import NodeReports
from kvferry.router.core.placer import Placer, RetryBudget
from kvferry.router.core.request import Request
from kvferry.router.core.request_table import RequestTable
from kvferry.router.core.router_core import RouterCore
from tests.simulation import swap_patches as swaps
from tests.simulation.mutation import Mutation, Patched, none, nothing
from tests.simulation.mutations_ahead import AHEAD_MUTATIONS
from tests.simulation.mutations_links import LINK_MUTATIONS
from tests.simulation.mutations_steps import STEP_MUTATIONS


def _restart_deadline(right: Patched) -> Patched:
    def plan(self: RequestTable, request: Request, now: float, *full: object) -> object:
        span = request.deadline - request.accepted_at
        request.accepted_at, request.deadline = now, now + span
        self._deadlines.append((request.deadline, request.request_id))
        self._deadlines[:] = [due for due in self._deadlines if due[1] != request.request_id or due[0] > now + span / 2]
        self._deadlines.sort()
        return right(self, request, now, *full)

    return plan


def _tried_once(right: Patched) -> Patched:
    def plan(self: RequestTable, request: Request, now: float, *full: object) -> object:
        return [] if request.is_new and request.accepted_at < now else right(self, request, now, *full)

    return plan


def _repeat_token(_: Patched) -> Patched:
    def take(self: Request, first_index: int, token_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        if first_index > self.next_index:
            return None
        self.output_token_ids.extend(token_ids)
        return token_ids

    return take


def _swallow_gap(_: Patched) -> Patched:
    def take(self: Request, first_index: int, token_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        fresh = token_ids[max(0, self.next_index - first_index) :]
        self.output_token_ids.extend(fresh)
        return fresh

    return take


def _any_attempt(_: Patched) -> Patched:
    def current(self: RequestTable, request_id: object, attempt: int) -> object:
        request = self.by_id.get(request_id)  # type: ignore[call-overload]
        return request if request is not None and request.placement is not None else None

    return current


def _second_target(right: Patched) -> Patched:
    def fail(self: HandoverSender, reason: str, now: float) -> object:
        if self.state is SendState.COMMITTING and self.candidates:
            self.machine.state, self.commit_sent = SendState.GRANTED, False
            return self.ask(now)
        return right(self, reason, now)

    return fail


def _forget_pin(_: Patched) -> Patched:
    def sync_pin(self: JobTable, job: object) -> None:
        job.pinned = job.sender is not None and job.sender.pieces_in_flight > 0  # type: ignore[attr-defined]

    return sync_pin


def _leave_writing(right: Patched) -> Patched:
    def end(self: EntryTable, entry: object, now: float) -> object:
        return [action for action in right(self, entry, now) if type(action).__name__ != "ForgetPieces"]  # type: ignore[attr-defined]

    return end


def _count_damaged(right: Patched) -> Patched:
    def on_damaged(self: CommitHandler, key: object, number: int, reason: str, now: float) -> object:
        entry = self.entries.by_key.get(key)  # type: ignore[call-overload]
        if entry is not None and entry.ledger is not None:
            layers, end = entry.ledger.num_layers, entry.spec.num_known
            whole = _FakePiece(number, 0, layers, entry.ledger.first_token_pos, end)
            entry.ledger.arrived[number] = whole
        return []

    return on_damaged


@dataclass(frozen=True, slots=True)
class _FakePiece:
    number: int
    layer_start: int
    layer_end: int
    token_start: int
    token_end: int


def _twice_released(right: Patched) -> Patched:
    def release(self: JobTable, job: object) -> object:
        seq_id = job.seq_id  # type: ignore[attr-defined]
        right(self, job)
        if seq_id is not None and self.scheduler.status(seq_id) is None:
            self.scheduler.abort(seq_id)
        return None

    return release


def _two_owners(right: Patched) -> Patched:
    def go_on(self: PrefillRole, job: object, first: object, now: float) -> object:
        seq_id = job.seq_id  # type: ignore[attr-defined]
        actions = right(self, job, first, now)
        self.jobs.add(job, seq_id)  # type: ignore[arg-type]
        return actions

    return go_on


def _all_wanted(_: Patched) -> Patched:
    return lambda *arguments, **named: True


def _as_of_too_high(right: Patched) -> Patched:
    def heartbeats(self: Heartbeats, only: object, *, last: bool = False) -> object:
        self.placer.placement_no += 1
        try:
            return right(self, only, last=last)
        finally:
            self.placer.placement_no -= 1

    return heartbeats


def _forget_held(right: Patched) -> Patched:
    def job(self: Placer, request: Request, plan: object, now: float) -> object:
        return msgspec.structs.replace(right(self, request, plan, now), output_token_ids=request.output_token_ids[:0])  # type: ignore[type-var]

    return job


def _no_age(right: Patched) -> Patched:
    def job(self: Placer, request: Request, plan: object, now: float) -> object:
        return msgspec.structs.replace(right(self, request, plan, now), waited_ms=0)  # type: ignore[type-var]

    return job


def _any_generation(right: Patched) -> Patched:
    def on_granted(self: HandoverSender, key: object, first_token: int, now: float, slots: object = ()) -> object:
        return right(self, self.key or key, first_token, now, slots)

    return on_granted


def _never_unknown(right: Patched) -> Patched:
    def on_heard(self: LinkTable, endpoint: str, sender: object, now: float, *, unknown: bool = False) -> object:
        return right(self, endpoint, sender, now)

    return on_heard


def _all_full(_: Patched) -> Patched:
    def full_for(self: RetryBudget, request: Request) -> object:
        return _Everything() if request.attempt else ()

    return full_for


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


def _never(_: Patched) -> Patched:
    return lambda *arguments, **named: False


def _reuse_at_once(right: Patched) -> Patched:
    def release(self: StagingSlots, key: TransferKey, now: float, *, confirmed: bool) -> object:
        return right(self, key, now, confirmed=True)

    return release


def _no_rest(right: Patched) -> Patched:
    def on_session_closed(self: StagingSlots, peer: Incarnation, now: float) -> object:
        return right(self, peer, now - 2 * self.timers.quarantine_s)

    return on_session_closed


def _session_unasked(right: Patched) -> Patched:
    def tick(self: StagingSlots, is_client: Callable[[Incarnation], bool], now: float) -> object:
        for quarantine in self._quarantined.values():
            quarantine.closed_at = quarantine.closed_at or now - 2 * self.timers.quarantine_s
        return right(self, is_client, now)

    return tick


def _name_at_once(right: Patched) -> Patched:
    def begin(self: KvSender, receiver: object, piece: Piece, table: object, values: object) -> None:
        right(self, receiver, piece, table, values)
        self._send_message(self._peers[piece.key.decode], receiver, piece, [])  # type: ignore[arg-type]

    return begin


def _write_blocks(right: Patched) -> Patched:
    tables: dict[tuple[Incarnation, TransferKey], tuple[int, ...]] = {}

    def write_slot(self: KvReceiver, piece: Piece, values: list[list[int]]) -> None:
        expected = self.expected.get(piece.key)
        if expected is not None:
            tables[self.incarnation, piece.key] = expected.table
        table = tables.get((self.incarnation, piece.key))
        for layer, row in enumerate(values if table is not None else [], piece.layer_start):
            self.store.write(layer, table, piece.token_start, row)  # type: ignore[arg-type]
        right(self, piece, values)

    return write_slot


def _credit_first(right: Patched) -> Patched:
    def arrive(self: KvReceiver, piece: Piece, values: object, damaged: bool, credit: Callable[[], None]) -> None:
        credit()
        right(self, piece, values, damaged, lambda: None)

    return arrive


def _always_stopped(right: Patched) -> Patched:
    def withdraw(self: HandoverSender) -> list[Action]:
        return [
            Send(action.peer, msgspec.structs.replace(action.message, stopped=True))
            if isinstance(action, Send) and isinstance(action.message, Abort)
            else action
            for action in right(self)  # type: ignore[attr-defined]
        ]

    return withdraw


def _into_slots_again(right: Patched) -> Patched:
    def give(self: HandoverSender, piece: Piece, slots: tuple[int, ...]) -> object:
        return right(self, piece, self._slots)

    return give


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("worker lists free nothing on decode", "13", DecodeRole, "on_heartbeat", nothing, "leaving"),
    Mutation("worker lists free nothing on prefill", "13", PrefillRole, "on_heartbeat", nothing, "leaving"),
    Mutation("every number counts as wanted", "13", Client, "wants", _all_wanted, "blips"),
    Mutation("as_of is one too high", "12", Heartbeats, "_send", _as_of_too_high, "delays"),
    Mutation("a silent client keeps what it had", "15", ClientTable, "take_silent", nothing, "crashes"),
    Mutation("a lost worker frees nothing on decode", "15", DecodeRole, "on_client_lost", nothing, "crashes"),
    Mutation("a lost worker frees nothing on prefill", "15", PrefillRole, "on_client_lost", nothing, "crashes"),
    Mutation("deadline starts again with each plan", "33", RequestTable, "_try_place", _restart_deadline),
    Mutation("age starts again with each plan", "17", Placer, "job", _no_age),
    Mutation("an answer to an earlier Reserve counts", "2", HandoverSender, "on_granted", _any_generation, "slow"),
    Mutation("the transport's stop is not heard", "21", HandoverSender, "on_stopped", nothing),
    Mutation("reservations are granted to the unwanted", "13", Reservations, "_refusal", none, "drain"),
    Mutation("HandedOver is not said again", "14", reports, "state", nothing, "blips"),
    Mutation("a forgotten client is not greeted again", "12", LinkTable, "on_heard", _never_unknown, "stalls"),
    Mutation("a finished token ends without its reason", "31", PrefillRole, "_note_first_token", none),
    Mutation("ungranted prompts are not bounded nor started", "18", PrefillRole, "may_start", _never, "none"),
    Mutation("a token that is known is sent on again", "29", Request, "add_tokens", _repeat_token),
    Mutation("a gap in the tokens is swallowed", "29", Request, "add_tokens", _swallow_gap, "blips"),
    Mutation("reports of other attempts count", "3", RequestTable, "current", _any_attempt),
    Mutation("a second decode node gets the Commit", "4", HandoverSender, "_fail", _second_target, "crashes"),
    Mutation("blocks are not pinned while they are read", "21", JobTable, "sync_pin", _forget_pin),
    Mutation("writing goes on after blocks are freed", "26", EntryTable, "_end_sequence", _leave_writing),
    Mutation("a slot is used again at once", "26", StagingSlots, "release", _reuse_at_once, "onesided"),
    Mutation("a slot of a closed session does not rest", "26", StagingSlots, "on_session_closed", _no_rest, "late"),
    Mutation("an open session is taken for closed", "26", StagingSlots, "tick", _session_unasked, "onesided"),
    Mutation("slots that rest are asked for by nobody", "26", StagingSlots, "tick", nothing, "onesided"),
    Mutation("a piece names a slot that is not written yet", "26", KvSender, "_begin_write", _name_at_once, "onesided"),
    Mutation("one-sided writes go into cache blocks", "26", KvReceiver, "write_slot", _write_blocks, "onesided"),
    Mutation("a slot is credited before it is copied", "26", KvReceiver, "arrive", _credit_first, "onesided"),
    Mutation(
        "Abort says stopped and writes are under way", "26", HandoverSender, "_withdraw", _always_stopped, "onesided"
    ),
    Mutation("Commit goes out before writes are confirmed", "24", HandoverSender, "_unconfirmed", _never, "onesided"),
    Mutation("after the Commit slots are written again", "26", HandoverSender, "_give", _into_slots_again, "onesided"),
    Mutation("a damaged piece counts as there", "25", CommitHandler, "on_damaged", _count_damaged, "damage"),
    Mutation("a damaged piece is never asked for", "25", CommitHandler, "_ask_again", nothing, "damage"),
    Mutation("no piece is ever missing", "25", PieceLedger, "missing", lambda _: lambda *a: (), "delays"),
    Mutation("blocks are released twice", "5", JobTable, "release", _twice_released),
    Mutation("the death of a node moves no request", "9", NodeReports, "on_node_lost", nothing, "crashes"),
    Mutation("the death of a decode node is not followed", "9", HandoverSender, "on_peer_lost", nothing, "crowded"),
    Mutation("silence is not judged", "9", LinkTable, "_judge", nothing, "stalls"),
    Mutation("Job is not sent again", "14", NodeReports, "_on_gone", nothing),
    Mutation("Commit and Reserve are not repeated", "24", HandoverSender, "tick", nothing, "blips"),
    Mutation("the end of a finished request is said once", "15", DecodeRole, "_tell_state", nothing, "blips"),
    Mutation("the early token is not marked as the last", "14", PrefillRole, "_on_finished", nothing),
    Mutation("a re-plan forgets the tokens held", "31", Placer, "job", _forget_held),
    Mutation("cancels and aborts free nothing", "16", EntryTable, "drop", nothing, "leaving"),
    Mutation("queued reservations are never granted", "18", Reservations, "grant_queued", nothing, "full"),
    Mutation("draining grants go on", "37", Reservations, "drain", nothing, "drain"),
    Mutation("a prompt that paused asks for no room again", "20", ReservationPauses, "go_on", nothing, "pauses"),
    Mutation("a re-plan waits for a node that has none", "35", RetryBudget, "full_for", _all_full, "crashes"),
    Mutation("new requests wait for no node", "35", RouterCore, "_may_wait", _never, "crashes"),
    Mutation("new requests that wait are never started", "35", RequestTable, "_try_place", _tried_once, "crashes"),
    Mutation("drain never ends", "37", NodeCore, "_drain_tick", nothing, "drain"),
    Mutation("what goes on where it was computed is forgotten", "4", DecodeRole, "take", nothing, "both"),
    Mutation("what goes on where it was computed has two owners", "5", PrefillRole, "_go_on_here", _two_owners, "both"),
    Mutation("transfer slots are not given", "24", HandoverManager, "give_slots", nothing, "none"),
    Mutation("blocks are freed before they are swapped out", "36", Swapping, "swap_out", swaps.free_uncopied, "swap"),
    Mutation("another's host blocks are swapped in", "36", Swapping, "swap_in", swaps.other_host_blocks, "swap"),
    Mutation("a sequence returns without its KV", "36", Swapping, "swap_in", swaps.return_uncopied, "swap"),
    Mutation("what is swapped out is forgotten", "36", Swapping, "swap_in", _never, "swap"),
    Mutation("host blocks are never free again", "36", HostPool, "release", none, "swap"),
    *AHEAD_MUTATIONS,
    *LINK_MUTATIONS,
    *STEP_MUTATIONS,
)
