"""Seeded defects of scheduling, cached KV, pieces, tokens and refusals. See mutations.py."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from kvferry.common.base.ids import (
    Incarnation,
    TransferKey,
)
from kvferry.common.cluster.actions import (
    Action,
    Send,
)
from kvferry.common.cluster.node_core import NodeCore
from kvferry.common.protocol.messages import Refused, Revoke
from kvferry.common.scheduling import (
    preemption_policy as room,
)
from kvferry.common.scheduling import (
    step_builder as batch,
)
from kvferry.common.scheduling.admission import Admission
from kvferry.common.scheduling.preemption_policy import rank
from kvferry.common.scheduling.sequence import Sequence
from kvferry.common.scheduling.step import ScheduledSequence
from kvferry.decode_node.entries import Entry, EntryTable
from kvferry.decode_node.receive_table import (
    PieceLedger,
    ReceiveState,
)
from kvferry.decode_node.reservations import Reservations
from kvferry.prefill_node.handover import HandoverSender
from kvferry.prefill_node.job import (
    JobState,
    PrefillJob,
)
from kvferry.prefill_node.jobs import JobTable
from kvferry.prefill_node.pieces import PiecesOut
from kvferry.router.core.node_reports import NodeReports
from kvferry.router.core.placer import Placer
from kvferry.router.core.request import Request, RequestEvent
from kvferry.router.core.request_table import RequestTable
from tests.simulation.mutation import Mutation, Patched, none, nothing


def _one_more_cached(right: Patched) -> Patched:
    def acquire(self: Admission, seq: Sequence) -> object:
        cached = right(self, seq)
        return cached if not isinstance(cached, int) or not cached else min(cached + 1, seq.spec.num_known - 1)

    return acquire


def _keep_held(right: Patched) -> Patched:
    def drop(self: JobTable, job: PrefillJob, now: float) -> object:
        return [] if job.state is JobState.FAILED and job.seq_id is not None else right(self, job, now)

    return drop


def _all_lacked(right: Patched) -> Patched:
    def on_granted(self: HandoverSender, key: TransferKey, first_token: int, *rest: object) -> object:
        return right(self, key, 0, *rest)

    return on_granted


def _second_copy(_: Patched) -> Patched:
    return lambda self, key: set(self._of(key).wanted)


def _take_back_owned(right: Patched) -> Patched:
    def make_room(self: Reservations, head: Entry, now: float) -> object:
        actions = right(self, head, now)
        assert isinstance(actions, list)
        owned = [entry for entry in self.entries if entry.state is ReceiveState.RUNNING]
        for victim in [] if actions else sorted(owned, key=lambda entry: self._rank(entry, now), reverse=True):
            if self._class(victim, now) > self._class(head, now):
                return self._revoke(victim, "priority", now)
        return actions

    return make_room


def _costly_setback(_: Patched) -> Patched:
    def setback(
        self: RequestTable, request: Request, event: RequestEvent, now: float, holder: Incarnation | None = None
    ) -> object:
        return self.loss(request, now, crashed=False, why="refused")

    return setback


def _no_crash(right: Patched) -> Patched:
    def loss(self: RequestTable, request: Request, now: float, *, crashed: bool, why: str) -> object:
        return right(self, request, now, crashed=False, why=why)

    return loss


def _wait_for_workers(right: Patched) -> Patched:
    def pump(self: NodeCore, now: float) -> object:
        slow = any(now - worker.last_heard > self.timers.heartbeat_s + 0.2 for worker in self.clients.workers())
        return [] if slow else right(self, now)

    return pump


def _draw_anew(right: Patched) -> Patched:
    def schedule(seq: Sequence, *rest: object) -> ScheduledSequence:
        part = right(seq, *rest)
        assert isinstance(part, ScheduledSequence)
        before = seq.spec.num_known - seq.spec.num_prompt_tokens
        return replace(part, seed_position=part.seed_position - before) if part.sample else part

    return schedule


def _oldest_gives_way(_: Patched) -> Patched:
    def choose_victim(decoding: Iterable[Sequence], *_: object) -> Sequence | None:
        return min((seq for seq in decoding if not seq.steps_in_flight and not seq.pins), key=rank, default=None)

    return choose_victim


def _uncounted(right: Patched) -> Patched:
    def job(self: Placer, request: Request, plan: object, now: float) -> object:
        return msgspec.structs.replace(right(self, request, plan, now), times_preempted=0)  # type: ignore[type-var]

    return job


def _forget_taken_back(_: Patched) -> Patched:
    def revoke(self: EntryTable, entry: Entry, answer: Revoke | Refused, now: float) -> list[Action]:
        return [*self.drop(entry, now), Send(entry.key.prefill, answer)]

    return revoke


STEP_MUTATIONS: tuple[Mutation, ...] = (
    Mutation("one position too many counts as cached", "19", Admission, "acquire", _one_more_cached),
    Mutation("held KV does not go with the list", "22", JobTable, "drop", _keep_held, "full"),
    Mutation("pieces carry what is there already", "23", HandoverSender, "on_granted", _all_lacked),
    Mutation("a piece is with the transport twice", "21", PiecesOut, "ready", _second_copy, "impatient"),
    Mutation("pieces that wait at their sender are lost", "25", PieceLedger, "hear_of", none, "congested"),
    Mutation("a failed hand-over moves nothing", "27", NodeReports, "_on_handover_failed", nothing, "full"),
    Mutation("what was taken back is granted anew", "28", EntryTable, "revoke", _forget_taken_back, "swap"),
    Mutation("what is owned gives way to a better class", "28", Reservations, "_make_room", _take_back_owned, "full"),
    Mutation("a refusal counts as a loss", "34", RequestTable, "setback", _costly_setback, "full"),
    Mutation("what ends its nodes is tried again and again", "34", RequestTable, "loss", _no_crash, "killers"),
    Mutation("an engine waits for a worker that is slow", "30", NodeCore, "_pump", _wait_for_workers, "stalls"),
    Mutation("a stream goes on with other weights", "32", Request, "fits", lambda _: lambda *a: True, "kinds"),
    Mutation("the draw begins anew with each attempt", "32", batch, "_schedule", _draw_anew, "crashes"),
    Mutation(
        "the best one gives its blocks back",
        "36",
        room,
        "choose_victim",
        _oldest_gives_way,
        "preemption",
    ),
    Mutation("preemptions are not counted", "36", Placer, "job", _uncounted, "preemption"),
)
