"""Seeded defects in the real cores: what the simulation must notice, one or two for each promise to a user.

Each is applied through a public seam, so that refactoring a core does not break it: a public method is wrapped, or an
event, an action or a message is changed on its way through `react` of a simulated process. `find_defects.py` runs them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from kvferry.common.cluster.actions import ExitProcess, ForgetPieces, Send
from kvferry.common.cluster.clients import Client
from kvferry.common.cluster.events import Received, Tick
from kvferry.common.cluster.links import LinkTable
from kvferry.common.kv.prefix_cache import Content, PrefixCache
from kvferry.common.protocol.messages import Abort, Granted, Heartbeat, Message
from kvferry.decode_node.receive_table import PieceLedger
from kvferry.decode_node.reservations import Reservations
from kvferry.decode_node.role import DecodeRole
from kvferry.decode_node.staging_slots import StagingSlots
from kvferry.ops.simulate.kv_receiver import KvReceiver
from kvferry.ops.simulate.node import SimNode
from kvferry.ops.simulate.process import Process
from kvferry.ops.simulate.worker import SimWorker
from kvferry.prefill_node.handover import HandoverSender
from kvferry.prefill_node.handover_table import SendState
from kvferry.prefill_node.jobs import JobTable
from kvferry.prefill_node.pieces import PiecesOut
from kvferry.router.core.node_reports import NodeReports
from kvferry.router.core.request import Request
from kvferry.router.core.request_table import RequestTable

Method = Callable[..., Any]


class Seams(ExitStack):
    """Wraps public methods of classes, and unwraps them at its exit."""

    def wrap(self, owner: type, method: str, make: Callable[[Method], Method]) -> None:
        """Replace a method by what `make` returns for it. Raises ValueError for a private one, KeyError for none."""
        if method.startswith("_"):
            raise ValueError(f"{owner.__name__}.{method} is private: a defect is applied through a public method")
        right = owner.__dict__[method]
        setattr(owner, method, make(right))
        self.callback(setattr, owner, method, right)

    def returns(self, owner: type, method: str, value: object) -> None:
        """Have a method do nothing and return a copy of `value`."""
        self.wrap(owner, method, lambda _: lambda *args, **named: list(value) if isinstance(value, list) else value)

    def actions(self, owner: type[Process], change: Callable[[object], object]) -> None:
        """Change each action that the cores of such processes return; one that becomes None is dropped."""

        def make(right: Method) -> Method:
            return lambda self, event, now: [new for old in right(self, event, now) if (new := change(old)) is not None]

        self.wrap(owner, "react", make)

    def messages(self, owner: type[Process], change: Callable[[Any], Any]) -> None:
        """Change each message that such processes send."""

        def changed(action: object) -> object:
            return (
                replace(action, message=cast(Message, change(action.message))) if isinstance(action, Send) else action
            )

        self.actions(owner, changed)


@dataclass(frozen=True, slots=True)
class Defect:
    """A promise, and a way in which code may break it. The profile's schedules must reveal it."""

    name: str
    promise: str
    apply: Callable[[Seams], None]
    profile: str = "all"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The cores have the defect within."""
        with Seams() as seams:
            self.apply(seams)
            yield


# -- blocks, incarnations, wanted sets


def _keep_writing(seams: Seams) -> None:
    seams.actions(SimNode, lambda action: None if isinstance(action, ForgetPieces) else action)


def _read_unpinned(seams: Seams) -> None:
    def make(_: Method) -> Method:
        def on_reading(self: JobTable, job: Any, reading: bool) -> None:
            job.pinned = reading
            if job.delisted and not reading:
                self.forget(job)

        return on_reading

    seams.wrap(JobTable, "on_reading", make)


def _any_attempt(seams: Seams) -> None:
    def make(_: Method) -> Method:
        def current(self: RequestTable, request_id: Any, attempt: int) -> Request | None:
            request = self.by_id.get(request_id)
            return request if request is not None and request.placement is not None else None

        return current

    seams.wrap(RequestTable, "current", make)


def _any_grant(seams: Seams) -> None:
    def make(right: Method) -> Method:
        def on_answer(self: HandoverSender, message: Any, now: float) -> object:
            if isinstance(message, Granted) and self.key is not None:
                message = msgspec.structs.replace(message, key=self.key)
            return right(self, message, now)

        return on_answer

    seams.wrap(HandoverSender, "on_answer", make)


def _any_sender(seams: Seams) -> None:
    def make(right: Method) -> Method:
        def handle(self: LinkTable, event: Any, now: float) -> object:
            link = self.links.get(event.endpoint) if isinstance(event, Received) else None
            if link is not None and link.peer is not None:
                event = replace(event, envelope=msgspec.structs.replace(event.envelope, sender=link.peer))
            return right(self, event, now)

        return handle

    seams.wrap(LinkTable, "handle", make)


def _too_new(seams: Seams) -> None:
    def change(message: Any) -> object:
        if isinstance(message, Heartbeat) and not message.last:
            return msgspec.structs.replace(message, as_of=message.as_of + 1)
        return message

    seams.messages(SimWorker, change)


# -- commits, tokens, deadlines, deaths


def _second_target(seams: Seams) -> None:
    def make(right: Method) -> Method:
        def on_peer_lost(self: HandoverSender, now: float) -> object:
            if self.state is SendState.COMMITTING and self.candidates:
                self.machine.state, self.commit_sent = SendState.GRANTED, False
                return self.ask(now)
            return right(self, now)

        return on_peer_lost

    seams.wrap(HandoverSender, "on_peer_lost", make)


def _add_twice(seams: Seams) -> None:
    def make(_: Method) -> Method:
        def add_tokens(self: Request, first_index: int, token_ids: tuple[int, ...]) -> tuple[int, ...] | None:
            if first_index > self.next_index:
                return None
            self.output_token_ids.extend(token_ids)
            return token_ids

        return add_tokens

    seams.wrap(Request, "add_tokens", make)


def _skip_gap(seams: Seams) -> None:
    def make(right: Method) -> Method:
        return lambda self, first_index, token_ids: right(self, min(first_index, self.next_index), token_ids)

    seams.wrap(Request, "add_tokens", make)


def _late_clock(seams: Seams) -> None:
    seams.wrap(RequestTable, "tick", lambda right: lambda self, now: right(self, now - 10.0))


def _ignore_silence(seams: Seams) -> None:
    def make(right: Method) -> Method:
        def handle(self: LinkTable, event: object, now: float) -> object:
            for link in self.links.values() if isinstance(event, Tick) else ():
                link.last_heard = now
            return right(self, event, now)

        return handle

    seams.wrap(LinkTable, "handle", make)


# -- pieces, staging slots, prefix cache, preemption, drain


def _accept_damaged(seams: Seams) -> None:
    def make(right: Method) -> Method:
        def arrive(self: KvReceiver, piece: Any, values: list[list[int]], damaged: bool, credit: Any) -> None:
            wrong = [[value ^ damaged for value in row] for row in values]
            right(self, piece, wrong, False, credit)

        return arrive

    seams.wrap(KvReceiver, "arrive", make)


def _second_copy(seams: Seams) -> None:
    seams.wrap(PiecesOut, "ready", lambda right: lambda self, key: {*right(self, key), *self.waiting(key)})


def _reuse_immediately(seams: Seams) -> None:
    def make(right: Method) -> Method:
        return lambda self, key, now, *, confirmed: right(self, key, now, confirmed=True)

    seams.wrap(StagingSlots, "release", make)


def _say_stopped(seams: Seams) -> None:
    def change(message: Any) -> object:
        return msgspec.structs.replace(message, stopped=True) if isinstance(message, Abort) else message

    seams.messages(SimNode, change)


def _trust_digest(seams: Seams) -> None:
    def weak(content: Content) -> Content:
        return Content(content.digest[:1], b"", b"")

    seams.wrap(PrefixCache, "find", lambda right: lambda self, content: right(self, weak(content)))
    seams.wrap(PrefixCache, "insert", lambda right: lambda self, block, content: right(self, block, weak(content)))


def _costly_setback(seams: Seams) -> None:
    def make(_: Method) -> Method:
        return lambda self, request, _, now, *__: self.loss(request, now, crashed=False, why="preempted or refused")

    seams.wrap(RequestTable, "setback", make)


def _never_exit(seams: Seams) -> None:
    seams.actions(SimNode, lambda action: None if isinstance(action, ExitProcess) else action)


BLOCKS = "a block is written only by its single holder"
STALE = "messages of an earlier incarnation, attempt or reservation change nothing"
WANTED = "what the wanted set drops is freed, what comes late is refused"
COMMIT = "an attempt has one Commit target, and commits once"
TOKENS = "each token index reaches the client once"
DEADLINE = "the deadline ends a request"
DEATH = "a death is noticed, and its requests are placed again"
PIECES = "damaged and missing pieces are sent again, none is with the transport twice"
STAGING = "a staging slot is in quarantine until its sender has stopped"
PREFIX = "a prefix-cache hit compares ids"
PREEMPTION = "a preempted request is placed again at no cost"
WEIGHTS = "nodes with other weights do not continue a stream"
DRAIN = "a drain finishes what the node has, and accepts no more"

DEFECTS: tuple[Defect, ...] = (
    Defect("pieces are written after the blocks are freed", BLOCKS, _keep_writing),
    Defect("blocks that the transport reads are not pinned", BLOCKS, _read_unpinned),
    Defect("a new incarnation is taken for the old one", STALE, _any_sender, "crashes"),
    Defect("reports of other attempts count", STALE, _any_attempt),
    Defect("the grant of an earlier reservation counts", STALE, _any_grant, "slow"),
    Defect("every request counts as wanted", WANTED, lambda seams: seams.returns(Client, "wants", True), "blips"),
    Defect("heartbeats free nothing", WANTED, lambda seams: seams.returns(DecodeRole, "on_heartbeat", []), "leaving"),
    Defect("as_of is one too high", WANTED, _too_new, "delays"),
    Defect("a second decode node gets the Commit", COMMIT, _second_target, "crashes"),
    Defect("a Commit is not repeated", COMMIT, lambda seams: seams.returns(HandoverSender, "tick", []), "blips"),
    Defect("a known token is delivered again", TOKENS, _add_twice),
    Defect("a gap before new tokens is skipped", TOKENS, _skip_gap, "blips"),
    Defect("deadlines are noticed 10 s late", DEADLINE, _late_clock, "deadlines"),
    Defect("silence is not noticed", DEATH, _ignore_silence, "stalls"),
    Defect("a lost node's requests stay there", DEATH, lambda s: s.returns(NodeReports, "on_node_lost", []), "crashes"),
    Defect("damaged pieces are accepted", PIECES, _accept_damaged, "damage"),
    Defect("no piece counts as missing", PIECES, lambda s: s.returns(PieceLedger, "missing", ()), "delays"),
    Defect("a piece is with the transport twice", PIECES, _second_copy, "impatient"),
    Defect("a staging slot is reused immediately", STAGING, _reuse_immediately, "onesided"),
    Defect("Abort says stopped during a write", STAGING, _say_stopped, "onesided"),
    Defect("digests are compared, ids are not", PREFIX, _trust_digest),
    Defect("a preemption costs an attempt", PREEMPTION, _costly_setback, "full"),
    Defect("a stream continues with other weights", WEIGHTS, lambda s: s.returns(Request, "fits", True), "kinds"),
    Defect("a draining node still grants", DRAIN, lambda s: s.returns(Reservations, "drain", []), "drain"),
    Defect("a drained node does not exit", DRAIN, _never_exit, "drain"),
)
