"""Handles what nodes report about requests. Pure.

A report counts only for the current attempt, and only from the node that the attempt is at; others are dropped.
Protocol rules 3, 14, 27, 29, 34.
"""

from dataclasses import dataclass

from kvferry.common.base.errors import GenerationError, KvferryError, OverloadedError
from kvferry.common.base.ids import Incarnation
from kvferry.common.cluster.actions import Send
from kvferry.common.cluster.links import Link, LinkTable
from kvferry.common.config.protocol import Limits
from kvferry.common.protocol.messages import FirstToken, Gone, HandedOver, HandoverFailed, Status, Tokens, TokensEntry
from kvferry.router.api import Outcome, TokensEvent
from kvferry.router.core.effects import Deliver, Effect
from kvferry.router.core.heartbeats import Heartbeats
from kvferry.router.core.placer import Placer
from kvferry.router.core.request import Request, RequestEvent, RequestState
from kvferry.router.core.request_table import RequestTable

Report = FirstToken | HandedOver | HandoverFailed | Gone


@dataclass(slots=True)
class NodeReports:
    """Turns messages of nodes into state changes of requests."""

    requests: RequestTable
    heartbeats: Heartbeats
    links: LinkTable
    placer: Placer
    limits: Limits

    # -- tokens

    def on_status(self, link: Link, sender: Incarnation, message: Status, now: float) -> None:
        """Load, progress, and the number of the last Tokens message, which reveals that it was lost."""
        self.placer.on_status(sender)
        if message.link_seq > link.link_seq:
            link.link_seq = message.link_seq
            self._request_resend(sender)
        if message.draining:
            self._forget_held_kv(sender)  # nothing is placed there any more, so no request must wait for it

    def on_tokens(self, link: Link, sender: Incarnation, message: Tokens, now: float) -> list[Effect]:
        """The tokens of one step, for all requests at this node."""
        if message.link_seq > link.link_seq + 1:
            self._request_resend(sender)
        link.link_seq = max(link.link_seq, message.link_seq)
        effects: list[Effect] = []
        for entry in message.entries:
            request = self.requests.current(entry.request_id, entry.attempt)
            if request is not None:
                effects += self._on_entry(request, sender, entry, now)
        return effects

    def _request_resend(self, sender: Incarnation) -> None:
        for request in self.requests:
            if request.decode == sender:
                request.resend = True
        self.heartbeats.send_soon(sender)

    def _on_entry(self, request: Request, sender: Incarnation, entry: TokensEntry, now: float) -> list[Effect]:
        placement = request.placement
        assert placement is not None
        if request.decode is None and (placement.has_candidate(sender) or placement.prefill == sender):
            self.requests.set_decode_node(request, RequestEvent.DECODE_TOKENS, sender, now)
        if request.decode != sender:
            return []
        request.decode_sent_tokens = True
        if entry.error is not None:
            return self.requests.end(request, "error", GenerationError(entry.error), now, "generation failed")
        request.note_cached(entry.cached_tokens)
        return self._add_tokens(request, sender, entry.first_index, entry.token_ids, entry.finish, now)

    def _add_tokens(
        self,
        request: Request,
        sender: Incarnation,
        first_index: int,
        token_ids: tuple[int, ...],
        finish: str | None,
        now: float,
    ) -> list[Effect]:
        index = request.next_index
        new_ids = request.add_tokens(first_index, token_ids)
        if new_ids is None:
            request.resend = True
            self.heartbeats.send_soon(sender)
            return []
        request.resend = False
        effects: list[Effect] = []
        if new_ids:
            request.setbacks = 0
            if request.made_progress:
                request.losses = request.crashes = 0
            effects.append(Deliver(request.request_id, TokensEvent(index, new_ids)))
        if finish is not None and first_index + len(token_ids) == request.next_index:
            outcome: Outcome = "stop" if finish == "stop" else "length"
            effects += self.requests.end(request, outcome, None, now, finish)
        return effects

    # -- hand-over

    def on_report(self, sender: Incarnation, message: Report, now: float) -> list[Effect]:
        """A node's report of one attempt."""
        request = self.requests.current(message.request_id, message.attempt)
        if request is None or request.placement is None:
            return []
        from_prefill = sender == request.placement.prefill
        match message:
            case FirstToken() if from_prefill:
                request.machine.move(RequestEvent.FIRST_TOKEN, now)
                request.note_cached(message.cached_tokens)
                return self._add_tokens(request, sender, message.index, (message.token_id,), message.finish, now)
            case HandedOver() if from_prefill and request.decode is None:
                self.requests.set_decode_node(request, RequestEvent.HANDED_OVER, message.decode, now)
                if self.links.peer(message.decode) is None:
                    return self.requests.loss(request, now, crashed=False, why="the decode node is gone")
            case HandoverFailed() if from_prefill and request.decode is None:
                return self._on_handover_failed(request, message, now)
            case Gone():
                return self._on_gone(request, sender, message, now)
        return []

    def _on_handover_failed(self, request: Request, message: HandoverFailed, now: float) -> list[Effect]:
        assert request.placement is not None
        detail = message.detail or message.reason
        if not message.retryable:
            error = GenerationError(detail) if message.reason == "generation" else KvferryError(detail)
            return self.requests.end(request, "error", error, now, message.reason)
        if message.reason == "overloaded" and request.attempt == 1:
            return self.requests.end(request, "error", OverloadedError(detail), now, message.reason)
        if message.reason != "revoked" and (message.commit_sent or message.reason == "lost"):
            if message.decode is not None:
                self.placer.penalise(request.placement.prefill, message.decode, now)
            request.losses += 1
            if request.losses >= self.limits.max_attempts:
                error = KvferryError(f"hand-over failed: {detail}")
                return self.requests.end(request, "error", error, now, "too many losses")
        holder = request.placement.prefill if message.retained else None
        return self.requests.setback(request, RequestEvent.HANDOVER_FAILED, now, holder)

    def _on_gone(self, request: Request, sender: Incarnation, message: Gone, now: float) -> list[Effect]:
        assert request.placement is not None
        if request.decode is not None:
            if sender != request.decode:
                return []
            if message.reason == "preempted":
                request.times_preempted += 1
                return self.requests.setback(request, RequestEvent.PREEMPTED, now)
            why = message.detail or "the decode node dropped the request"
            return self.requests.loss(request, now, crashed=False, why=why)
        if sender != request.placement.prefill:
            return []
        if message.reason == "never_known":
            request.machine.move(RequestEvent.NEVER_KNOWN, now)
            return [Send(sender, self.placer.job(request, request.placement, now))]
        if message.reason == "preempted":
            return self.requests.setback(request, RequestEvent.LOST, now)
        why = message.detail or "the prefill node dropped the request"
        return self.requests.loss(request, now, crashed=False, why=why)

    # -- deaths

    def on_node_lost(self, peer: Incarnation, now: float) -> list[Effect]:
        """An incarnation has ended, or counts as ended: its requests are placed again.

        A node that sends messages but makes no progress may only be slow: a request counts it as a loss, not as a
        crash that it may have caused.
        """
        self.placer.forget(peer)
        self.heartbeats.forget(peer)
        self._forget_held_kv(peer)
        wedged = self.links.is_wedged(peer)
        end = "makes no progress" if wedged else "died"
        effects: list[Effect] = []
        for request in self.requests:
            placement = request.placement
            if request.state is RequestState.HANDED_OVER and request.decode == peer:
                effects += self.requests.loss(request, now, crashed=not wedged, why=f"the decode node {end}")
            elif request.state is RequestState.PLACED and placement is not None and placement.prefill == peer:
                effects += self.requests.loss(request, now, crashed=False, why=f"the prefill node {end}")
        return effects

    def _forget_held_kv(self, peer: Incarnation) -> None:
        for request in self.requests:
            if request.holder == peer:
                request.holder = None
