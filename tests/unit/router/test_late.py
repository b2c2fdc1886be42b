"""A router worker that slept processes waiting messages before timeouts: rule 9."""

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvferry.common.base.clock import ManualClock
from kvferry.common.base.ids import RequestId, new_incarnation
from kvferry.common.cluster.links import LinkState
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import Envelope, FirstToken, Hello, Job, Message, Status, Welcome
from kvferry.common.protocol.model_info import Compatibility, ModelInfo
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.common.protocol.wire import decode, encode
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.options import SocketOptions
from kvferry.router.api import EndEvent, GenerateRequest, TokensEvent
from kvferry.router.service import RouterService, ServiceSettings
from tests.support.eventually import eventually
from tests.support.generate_request import generate_request
from tests.support.transport import transport_context

REQUEST = RequestId("a" * 32)
COMPATIBILITY = Compatibility(protocol_version=1, model="m", kv_dtype="f", kv_layout="l", block_size=4, num_layers=1)


class Node:
    """A colocated node played by the test, over a real socket."""

    def __init__(self, context: TransportContext) -> None:
        self.self_id = new_incarnation()
        self.socket = NodeSocket(context, SocketOptions())
        self.endpoint = self.socket.bind("inproc://node")
        self.received: list[Message] = []
        self.worker = self.self_id

    def has_received(self, kind: type[Message]) -> bool:
        """Whether the worker has sent a message of this kind."""
        for peer, frames in self.socket.receive():
            self.worker = peer
            self.received.append(decode(frames, Limits()).message)
        return any(isinstance(message, kind) for message in self.received)

    def send(self, message: Message) -> None:
        self.socket.send(self.worker, encode(Envelope(self.self_id, self.worker, message), Limits()))


@asynccontextmanager
async def running(clock: ManualClock) -> AsyncIterator[tuple[RouterService, Node]]:
    with transport_context() as context:
        node = Node(context)
        settings = ServiceSettings("w", Timers(), Limits(), static_nodes=(node.endpoint,))
        service = RouterService(settings, clock, context, logging.getLogger("tests.late"))
        await service.start()
        await eventually(lambda: node.has_received(Hello), "the worker sends Hello")
        model = ModelInfo(name="m", vocab_size=8, max_model_len=64, max_position_embeddings=64)
        node.send(Welcome(name="n", roles=("prefill", "decode"), model=model, compatibility=COMPATIBILITY))
        node.send(Status(status_no=1))
        await eventually(lambda: service.not_ready_reason("m") is None, "the node is known")
        yield service, node
        await service.stop()
        node.socket.close()


def request(timeout_s: float) -> GenerateRequest:
    return generate_request(REQUEST, "m", array("I", [1, 2]), SamplingParams(max_new_tokens=1), timeout_s=timeout_s)


@pytest.mark.rule(9)
@pytest.mark.parametrize("slept_s", [9.0, 0.2])
def test_a_last_token_that_arrived_during_the_sleep_counts_before_the_deadline(slept_s: float):
    """Only a late tick reads messages first: a deadline that passes while the process is awake holds."""

    async def main() -> None:
        clock = ManualClock(100.0)
        async with running(clock) as (service, node):
            stream = service.submit(request(timeout_s=0.1))
            await eventually(lambda: node.has_received(Job), "the Job comes")
            service.tick()
            node.send(FirstToken(request_id=REQUEST, attempt=1, index=0, token_id=7, finish="length"))
            clock.advance(slept_s)
            service.tick()
            events = [event async for event in stream]
            end = events[-1]
            assert isinstance(end, EndEvent)
            if slept_s > 1.0:
                assert events[0] == TokensEvent(0, (7,))
                assert end.outcome == "length"
            else:
                assert end.outcome == "timeout"

    asyncio.run(main())


def test_a_sleep_of_the_worker_does_not_make_a_node_dead():
    async def main() -> None:
        clock = ManualClock(100.0)
        async with running(clock) as (service, node):
            service.tick()
            node.send(Status(status_no=2))
            clock.advance(60.0)
            service.tick()
            link = service.core.links.peer(node.self_id)
            assert link is not None
            assert link.state is LinkState.ALIVE
            assert link.status == Status(status_no=2)

    asyncio.run(main())
