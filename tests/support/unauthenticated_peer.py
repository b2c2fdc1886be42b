"""A peer that sends Hello and then any messages a test wants. To nodes it is a client like any other."""

import asyncio

from kvferry.common.base.ids import Incarnation, new_incarnation
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import ClientKind, Envelope, Heartbeat, Hello, Message, WantedRequest, Welcome
from kvferry.common.protocol.model_info import Compatibility
from kvferry.common.protocol.wire import decode, encode
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.options import SocketOptions
from tests.support.eventually import eventually

NUMBER = 2**40
"""Above the `as_of` of every heartbeat: placements with this number count as wanted, listed or not."""


class UnauthenticatedPeer:
    """One link to one node. Call `meet` first and `leave` last."""

    def __init__(self, context: TransportContext, kind: ClientKind, compatibility: Compatibility | None = None) -> None:
        self.incarnation = new_incarnation()
        self.peer = Incarnation("")
        self.heard: list[Message] = []
        """All received messages, in order; `listen` receives more."""
        self._hello = Hello(kind=kind, name="unauthenticated", compatibility=compatibility)
        self._link = LinkSocket(context, self.incarnation, SocketOptions.control(Limits(), Timers()))
        self._heartbeat_no = 0

    async def meet(self, endpoint: str) -> None:
        """Send Hello until a Welcome arrives."""
        self._link.open()
        self._link.connect(endpoint)

        def welcomed() -> bool:
            self.say(self._hello)
            self.listen()
            return bool(self.peer)

        await eventually(welcomed, "Welcome")

    def say(self, message: Message) -> None:
        """Send a message to the incarnation that answered Hello."""
        self._link.send(encode(Envelope(self.incarnation, self.peer, message), Limits()))

    def send_heartbeat(self, *entries: WantedRequest, last: bool = False) -> None:
        """Send a heartbeat with these wanted requests."""
        self._heartbeat_no += 1
        self.say(Heartbeat(heartbeat_no=self._heartbeat_no, as_of=NUMBER - 1, wanted=entries, last=last))

    def listen(self) -> list[Message]:
        """Receive the available messages; returns all received so far."""
        for frames in self._link.receive():
            envelope = decode(frames, Limits())
            if isinstance(envelope.message, Welcome):
                self.peer = envelope.sender
            self.heard.append(envelope.message)
        return self.heard

    async def hear(self, kind: type[Message]) -> Message:
        """Wait for the first message of this type."""
        await eventually(lambda: any(isinstance(m, kind) for m in self.listen()), kind.__name__)
        return next(message for message in self.heard if isinstance(message, kind))

    async def leave(self) -> None:
        """Send a last heartbeat that wants nothing, and close."""
        self.send_heartbeat(last=True)
        await asyncio.sleep(0)
        self._link.close()
