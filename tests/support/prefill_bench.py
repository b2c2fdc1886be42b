"""A prefill node's cores without a cluster: the test speaks for worker, decode nodes, engine and transport.

The node may have a decode role as well. Every event is followed by a check of all invariants.
"""

from array import array
from collections.abc import Iterable
from typing import TypeVar

from kvferry.common.base.ids import Incarnation, RequestId, TransferKey
from kvferry.common.cluster.actions import Action, RunStep, Send, SendPiece, StopPieces
from kvferry.common.cluster.events import Event, PieceSent, PiecesStopped, Received, StepDone, Tick
from kvferry.common.cluster.node_core import NodeCore, NodeIdentity
from kvferry.common.cluster.node_role import NodeRole
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.kv.block_pool import BlockPool
from kvferry.common.protocol.messages import (
    Candidate,
    Committed,
    Envelope,
    Granted,
    Heartbeat,
    Hello,
    Job,
    Message,
    Reserve,
    Status,
    WantedRequest,
    Welcome,
)
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.scheduling.scheduler import Scheduler
from kvferry.common.scheduling.sequence import SchedulerConfig
from kvferry.common.scheduling.step import StepBatch, StepResult
from kvferry.decode_node.role import DecodeRole
from kvferry.prefill_node.role import make_prefill_role
from tests.support.role_context import COMPATIBILITY, SELF_ID, role_context

WORKER = Incarnation("4" * 32)
DECODES = (Incarnation("2" * 32), Incarnation("3" * 32))
MODEL = ModelInfo(name="m", vocab_size=100, max_model_len=64, max_position_embeddings=64)
M = TypeVar("M", bound=Message)


def request(number: int) -> RequestId:
    """A request id."""
    return RequestId(f"{number:032x}")


def said(actions: Iterable[object], kind: type[M]) -> list[M]:
    """The messages of one type among what is to be done."""
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


class PrefillBench:
    """One worker that said Hello and is silent unless spoken for; links to two decode nodes that are up."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        num_blocks: int = 32,
        max_running: int = 8,
        steps_in_flight: int = 4,
        eos_token_ids: frozenset[int] = frozenset(),
        colocated: bool = False,
        max_step_tokens: int = 64,
        staging_host: str = "",
    ) -> None:
        self.timers, self.limits = Timers(), limits or Limits()
        self.pool = BlockPool(num_blocks, 4, "m")
        config = SchedulerConfig(
            eos_token_ids=eos_token_ids,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            max_steps_in_flight=steps_in_flight,
        )
        self.scheduler = Scheduler(config, self.pool)
        context = role_context(self.scheduler, timers=self.timers, limits=self.limits, staging_host=staging_host)
        self.decode = DecodeRole(context)
        self.role = make_prefill_role(context, self.decode if colocated else None)
        roles: list[NodeRole] = [self.role, self.decode] if colocated else [self.role]
        identity = NodeIdentity(SELF_ID, "p", MODEL, COMPATIBILITY)
        self.core = NodeCore(identity, self.timers, self.scheduler, roles, context.clients)
        self.steps: list[StepBatch] = []
        self.pieces: list[SendPiece] = []
        self._heartbeat_no = 0
        self.deliver(WORKER, Hello(kind="worker", name="w"), 0.0)

    # -- what happens

    def handle(self, event: Event, now: float) -> list[Action]:
        """Any event."""
        actions = self.core.handle(event, now)
        self.core.check_invariants()
        self.steps += [action.plan for action in actions if isinstance(action, RunStep)]
        self.pieces += [action for action in actions if isinstance(action, SendPiece)]
        return actions

    def deliver(self, sender: Incarnation, message: Message, now: float) -> list[Action]:
        """A client of the node says something."""
        return self.handle(Received(Envelope(sender, SELF_ID, message)), now)

    def hear(self, decode: Incarnation, message: Message, now: float) -> list[Action]:
        """A decode node says something."""
        return self.handle(Received(Envelope(decode, SELF_ID, message), f"d{DECODES.index(decode)}"), now)

    def tick(self, now: float, *, worker: bool = True) -> list[Action]:
        """Time went by; the worker, unless it is silent, and the decode nodes are heard first."""
        if worker:
            self.core.clients.clients[WORKER].last_heard = now
        for decode in DECODES:
            if self.role.decodes.is_up(decode):
                self.hear(decode, Status(status_no=int(now * 1000)), now)
        return self.handle(Tick(), now)

    # -- the worker

    def job(
        self,
        number: int = 1,
        now: float = 0.1,
        *,
        attempt: int = 1,
        placement_no: int = 1,
        prompt: int = 6,
        outputs: tuple[int, ...] = (),
        max_new_tokens: int = 4,
        candidates: int = 2,
        here: bool = False,
        remaining_ms: int = 60_000,
        priority: int = 3,
        waited_ms: int = 0,
        times_preempted: int = 0,
    ) -> list[Action]:
        """The worker sends a Job. The prompt's ids follow from its number and length. here: named first."""
        others = [(peer, f"d{index}") for index, peer in enumerate(DECODES[:candidates])]
        message = Job(
            request_id=request(number),
            attempt=attempt,
            placement_no=placement_no,
            spec=RequestSpec(
                model="m",
                prompt_token_ids=array("I", range(number, number + prompt)),
                output_token_ids=array("I", outputs),
                sampling=SamplingParams(max_new_tokens=max_new_tokens),
                priority=priority,
                times_preempted=times_preempted,
            ),
            remaining_ms=remaining_ms,
            waited_ms=waited_ms,
            candidates=tuple(
                Candidate(incarnation=peer, name=name, endpoint=name)
                for peer, name in ([(SELF_ID, "p")] if here else []) + others
            ),
        )
        return self.deliver(WORKER, message, now)

    def heartbeat(
        self,
        now: float,
        *wanted: tuple[int, int],
        as_of: int = 1,
        expected: bool = True,
        next_index: int = 0,
        resend: bool = False,
    ) -> list[Action]:
        """The worker's list: (number, attempt) of what it wants."""
        self._heartbeat_no += 1
        entries = tuple(
            WantedRequest(
                request_id=request(number), attempt=attempt, next_index=next_index, expected=expected, resend=resend
            )
            for number, attempt in wanted
        )
        return self.deliver(WORKER, Heartbeat(heartbeat_no=self._heartbeat_no, as_of=as_of, wanted=entries), now)

    # -- decode nodes

    def link_up(self, now: float = 0.1, staging: tuple[str, ...] = ()) -> list[Action]:
        """Both decode nodes are known and up, and have their staging slots there."""
        actions: list[Action] = []
        for index, decode in enumerate(DECODES):
            self.role.decodes.links.add(f"d{index}", now)
            welcome = Welcome(
                name=f"d{index}",
                roles=("decode",),
                model=MODEL,
                compatibility=COMPATIBILITY,
                kv_endpoints=("kv",),
                staging=staging,
            )
            actions += self.hear(decode, welcome, now)
        return actions

    def grant(self, reserve: Reserve, now: float, first_token: int = 0, slots: tuple[int, ...] = ()) -> list[Action]:
        """The node that was asked keeps room."""
        granted = Granted(key=reserve.key, first_token=first_token, slots=slots)
        return self.hear(reserve.key.decode, granted, now)

    def committed(
        self, key: TransferKey, now: float, *, complete: bool = True, missing: tuple[int, ...] = ()
    ) -> list[Action]:
        """The decode node owns it."""
        return self.hear(key.decode, Committed(key=key, complete=complete, missing=missing), now)

    # -- engine and transport

    def step(self, now: float, token: int = 50, failed: str = "") -> list[Action]:
        """The oldest step in flight is done: this token for all that want one, or this failure for all in it."""
        plan = self.steps.pop(0)
        ids = [part.seq_id for part in plan.scheduled]
        sampled = {part.seq_id: token for part in plan.scheduled if part.sample and not failed}
        return self.handle(
            StepDone(StepResult(plan.step_id, sampled, dict.fromkeys(ids, failed) if failed else {})), now
        )

    def sent(self, now: float) -> list[Action]:
        """The transport has read all pieces that it was given."""
        actions: list[Action] = []
        pieces, self.pieces = self.pieces, []
        for action in pieces:
            actions += self.handle(PieceSent(action.piece.key, action.piece.number), now)
        return actions

    def stopped(self, actions: Iterable[Action], now: float) -> list[Action]:
        """The transport has stopped what it was asked to stop."""
        keys = [action.key for action in actions if isinstance(action, StopPieces)]
        return [done for key in keys for done in self.handle(PiecesStopped(key), now)]
