"""A peer that says Hello and then whatever a test wants: to nodes it is a client like any other."""

import asyncio

from kvferry.common.base.ids import (
    Incarnation,
    new_incarnation,
)
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.protocol.messages import ClientKind, Envelope, Heartbeat, Hello, Message, WantedRequest, Welcome
from kvferry.common.protocol.model_info import Compatibility
from kvferry.common.protocol.wire import decode, encode
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.options import SocketOptions
from tests.support.eventually import eventually

NUMBER = 2**40
"""Above the `as_of` of every list: plans with it are wanted, listed or not."""


class Stranger:
    """One link to one node. Use `meet` first, `leave` last."""

    def __init__(self, context: TransportContext, kind: ClientKind, compatibility: Compatibility | None = None) -> None:
        self.incarnation = new_incarnation()
        self.peer = Incarnation("")
        self.heard: list[Message] = []
        """Everything that came, in order; `listen` takes more in."""
        self._hello = Hello(kind=kind, name="stranger", compatibility=compatibility)
        self._link = LinkSocket(context, self.incarnation, SocketOptions.control(Limits(), Timers()))
        self._beat_no = 0

    async def meet(self, endpoint: str) -> None:
        """Say Hello until there is a Welcome."""
        self._link.open()
        self._link.connect(endpoint)

        def welcomed() -> bool:
            self.say(self._hello)
            self.listen()
            return bool(self.peer)

        await eventually(welcomed, "Welcome")

    def say(self, message: Message) -> None:
        """Send it, to the life that answered Hello."""
        self._link.send(encode(Envelope(self.incarnation, self.peer, message), Limits()))

    def beat(self, *entries: WantedRequest, last: bool = False) -> None:
        """Send a list."""
        self._beat_no += 1
        self.say(Heartbeat(heartbeat_no=self._beat_no, as_of=NUMBER - 1, wanted=entries, last=last))

    def listen(self) -> list[Message]:
        """Take in what is there; all that was heard so far."""
        for frames in self._link.receive():
            envelope = decode(frames, Limits())
            if isinstance(envelope.message, Welcome):
                self.peer = envelope.sender
            self.heard.append(envelope.message)
        return self.heard

    async def hear(self, kind: type[Message]) -> Message:
        """The first message of this type, as soon as it is there."""
        await eventually(lambda: any(isinstance(m, kind) for m in self.listen()), kind.__name__)
        return next(message for message in self.heard if isinstance(message, kind))

    async def leave(self) -> None:
        """Give up all that it had, and close."""
        self.beat(last=True)
        await asyncio.sleep(0)
        self._link.close()
