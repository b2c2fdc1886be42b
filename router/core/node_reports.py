"""What nodes report of requests, and what follows from it. Pure.

Only the current attempt counts, and only from the node that the attempt is at; the rest changes nothing.
Protocol rules 3, 14, 27, 29, 34.
"""

from dataclasses import dataclass

from kvferry.common.base.errors import (
    GenerationError,
    KvferryError,
    OverloadedError,
)
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.links import (
    Link,
    LinkTable,
)
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import FirstToken, Gone, HandedOver, HandoverFailed, Status, Tokens, TokensEntry
from kvferry.router.api import Outcome, TokensEvent
from kvferry.router.core.effects import Deliver, Effect
from kvferry.router.core.heartbeats import Heartbeats
from kvferry.router.core.placer import Placer
from kvferry.router.core.request import (
    Request,
    RequestEvent,
    RequestState,
)
from kvferry.router.core.request_table import RequestTable

Report = FirstToken | HandedOver | HandoverFailed | Gone


@dataclass(slots=True)
class NodeReports:
    """Turns messages into moves of requests."""

    requests: RequestTable
    lists: Heartbeats
    links: LinkTable
    planner: Placer
    limits: Limits

    # -- tokens

    def on_status(self, link: Link, sender: Incarnation, message: Status, now: float) -> None:
        """Load, progress, and the number of the last Tokens: a lost last message is seen by it."""
        self.planner.on_status(sender)
        if message.link_seq > link.link_seq:
            link.link_seq = message.link_seq
            self._ask_again(sender)
        if message.draining:
            self._nothing_held_at(sender)  # nothing is planned there any more, and it is not to wait for that

    def on_tokens(self, link: Link, sender: Incarnation, message: Tokens, now: float) -> list[Effect]:
        """A step's tokens of all requests there."""
        if message.link_seq > link.link_seq + 1:
            self._ask_again(sender)
        link.link_seq = max(link.link_seq, message.link_seq)
        effects: list[Effect] = []
        for entry in message.entries:
            request = self.requests.current(entry.request_id, entry.attempt)
            if request is not None:
                effects += self._on_entry(request, sender, entry, now)
        return effects

    def _ask_again(self, sender: Incarnation) -> None:
        for request in self.requests:
            if request.decode == sender:
                request.resend = True
        self.lists.hurry(sender)

    def _on_entry(self, request: Request, sender: Incarnation, entry: TokensEntry, now: float) -> list[Effect]:
        assert request.plan is not None
        if request.decode is None and (request.plan.names(sender) or request.plan.prefill == sender):
            self.requests.own(request, RequestEvent.DECODE_TOKENS, sender, now)
        if request.decode != sender:
            return []
        request.decode_spoke = True
        if entry.error is not None:
            return self.requests.end(request, "error", GenerationError(entry.error), now, "generation failed")
        request.note_cached(entry.cached_tokens)
        return self._take(request, sender, entry.first_index, entry.token_ids, entry.finish, now)

    def _take(
        self,
        request: Request,
        sender: Incarnation,
        first_index: int,
        token_ids: tuple[int, ...],
        finish: str | None,
        now: float,
    ) -> list[Effect]:
        index = request.next_index
        fresh = request.take(first_index, token_ids)
        if fresh is None:
            request.resend = True
            self.lists.hurry(sender)
            return []
        request.resend = False
        effects: list[Effect] = []
        if fresh:
            request.setbacks = 0
            if request.made_progress:
                request.losses = request.crashes = 0
            effects.append(Deliver(request.request_id, TokensEvent(index, fresh)))
        if finish is not None and first_index + len(token_ids) == request.next_index:
            outcome: Outcome = "stop" if finish == "stop" else "length"
            effects += self.requests.end(request, outcome, None, now, finish)
        return effects

    # -- hand-over

    def on_report(self, sender: Incarnation, message: Report, now: float) -> list[Effect]:
        """What a node says of one attempt."""
        request = self.requests.current(message.request_id, message.attempt)
        if request is None or request.plan is None:
            return []
        from_prefill = sender == request.plan.prefill
        match message:
            case FirstToken() if from_prefill:
                request.machine.move(RequestEvent.FIRST_TOKEN, now)
                request.note_cached(message.cached_tokens)
                return self._take(request, sender, message.index, (message.token_id,), message.finish, now)
            case HandedOver() if from_prefill and request.decode is None:
                self.requests.own(request, RequestEvent.HANDED_OVER, message.decode, now)
                if self.links.peer(message.decode) is None:
                    return self.requests.loss(request, now, crashed=False, why="the decode node is gone")
            case HandoverFailed() if from_prefill and request.decode is None:
                return self._on_handover_failed(request, message, now)
            case Gone():
                return self._on_gone(request, sender, message, now)
        return []

    def _on_handover_failed(self, request: Request, message: HandoverFailed, now: float) -> list[Effect]:
        assert request.plan is not None
        detail = message.detail or message.reason
        if not message.retryable:
            error = GenerationError(detail) if message.reason == "generation" else KvferryError(detail)
            return self.requests.end(request, "error", error, now, message.reason)
        if message.reason == "overloaded" and request.attempt == 1:
            return self.requests.end(request, "error", OverloadedError(detail), now, message.reason)
        if message.reason != "revoked" and (message.commit_sent or message.reason == "lost"):
            if message.decode is not None:
                self.planner.penalise(request.plan.prefill, message.decode, now)
            request.losses += 1
            if request.losses >= self.limits.max_attempts:
                error = KvferryError(f"hand-over failed: {detail}")
                return self.requests.end(request, "error", error, now, "too many losses")
        holder = request.plan.prefill if message.retained else None
        return self.requests.setback(request, RequestEvent.HANDOVER_FAILED, now, holder)

    def _on_gone(self, request: Request, sender: Incarnation, message: Gone, now: float) -> list[Effect]:
        assert request.plan is not None
        if request.decode is not None:
            if sender != request.decode:
                return []
            if message.reason == "preempted":
                request.times_preempted += 1
                return self.requests.setback(request, RequestEvent.PREEMPTED, now)
            why = message.detail or "the decode node no longer has it"
            return self.requests.loss(request, now, crashed=False, why=why)
        if sender != request.plan.prefill:
            return []
        if message.reason == "never_known":
            request.machine.move(RequestEvent.NEVER_KNOWN, now)
            return [Send(sender, self.planner.job(request, request.plan, now))]
        if message.reason == "preempted":
            return self.requests.setback(request, RequestEvent.LOST, now)
        why = message.detail or "the prefill node no longer has it"
        return self.requests.loss(request, now, crashed=False, why=why)

    # -- deaths

    def on_node_lost(self, peer: Incarnation, now: float) -> list[Effect]:
        """A life has ended, or counts as ended: what was there is planned again.

        A node that talks and does not move may be only slow: that is no crash that a request may be the cause of.
        """
        self.planner.forget(peer)
        self.lists.forget(peer)
        self._nothing_held_at(peer)
        wedged = self.links.is_wedged(peer)
        end = "makes no progress" if wedged else "died"
        effects: list[Effect] = []
        for request in self.requests:
            if request.state is RequestState.HANDED and request.decode == peer:
                effects += self.requests.loss(request, now, crashed=not wedged, why=f"the decode node {end}")
            elif request.state is RequestState.PLACED and request.plan is not None and request.plan.prefill == peer:
                effects += self.requests.loss(request, now, crashed=False, why=f"the prefill node {end}")
        return effects

    def _nothing_held_at(self, peer: Incarnation) -> None:
        for request in self.requests:
            if request.holder == peer:
                request.holder = None
