"""A link table driven by single calls, which collects the deaths that its results report."""

from dataclasses import dataclass, field

from kvferry.common.base.ids import Incarnation, RequestId
from kvferry.common.cluster.actions import Action
from kvferry.common.cluster.events import LinkClosed, LinkConnected, ProbeAnswered, Received, Tick
from kvferry.common.cluster.links import Link, LinkInput, LinkTable
from kvferry.common.protocol.messages import Envelope, Gone, Message, Status, WrongIncarnation

ANY_MESSAGE = Gone(request_id=RequestId("a" * 32), attempt=1, reason="lost")
RECEIVER = Incarnation("9" * 32)


@dataclass
class DrivenLinks:
    """Each method is one event. `take_lost` returns the deaths since its last call."""

    table: LinkTable
    _lost: list[Incarnation] = field(default_factory=list)

    def handle(self, event: LinkInput, now: float) -> list[Action]:
        update = self.table.handle(event, now)
        self._lost += update.lost
        return update.actions

    def hear(self, endpoint: str, sender: Incarnation, message: Message, now: float) -> list[Action]:
        return self.handle(Received(Envelope(sender, RECEIVER, message), endpoint), now)

    def heard(self, endpoint: str, sender: Incarnation, now: float, *, unknown: bool = False) -> list[Action]:
        return self.hear(endpoint, sender, WrongIncarnation() if unknown else ANY_MESSAGE, now)

    def status(self, link: Link, message: Status, now: float) -> None:
        assert link.peer is not None
        self.hear(link.endpoint, link.peer, message, now)

    def connected(self, endpoint: str, now: float) -> list[Action]:
        return self.handle(LinkConnected(endpoint), now)

    def closed(self, endpoint: str, now: float) -> list[Action]:
        return self.handle(LinkClosed(endpoint), now)

    def probe(self, endpoint: str, refused: bool, now: float) -> list[Action]:
        return self.handle(ProbeAnswered(endpoint, "refused" if refused else "accepted"), now)

    def tick(self, now: float) -> list[Action]:
        return self.handle(Tick(), now)

    def take_lost(self) -> list[Incarnation]:
        lost, self._lost = self._lost, []
        return lost
