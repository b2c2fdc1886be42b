"""The mover of KV of a tensor-parallel node: each rank moves its own part, the node hears one word of each piece."""

import threading
from collections.abc import Callable

from kvferry.common.base.ids import (
    Incarnation,
    TransferKey,
)
from kvferry.common.cluster.events import (
    EngineFailed,
    Event,
    SessionClosed,
)
from kvferry.common.kv_transfer.interface import KvEvent, KvMover
from kvferry.common.protocol.messages import Piece
from kvferry.common.ranks.messages import ClosePeer, ExpectKv, ForgetKv, OpenPeer, PieceHeader, SendKv, StopKv
from kvferry.common.ranks.tally import PieceTally
from kvferry.common.ranks.team import RankTeam

PostEvent = Callable[[Event], None]


class RankedKvMover:
    """Implements KvMover on rank 0. What its own rank does is done by `own`, whose events go to `on_own_event`.

    Rank i sends to rank i: the nodes have as many ranks, which Hello has compared.
    """

    def __init__(
        self, team: RankTeam, make_own: Callable[[Callable[[KvEvent], None]], KvMover], post: PostEvent
    ) -> None:
        self._team = team
        self._post = post
        self._tally = PieceTally(team.size)
        self._lock = threading.Lock()
        self._own = make_own(lambda event: self.on_rank_event(0, event))

    def start(self) -> str:
        """Bind and begin; returns rank 0's endpoint. The other ranks have begun already."""
        endpoint = self._own.start()
        self._team.listen(self)
        return endpoint

    @property
    def staging_address(self) -> str:
        """Nowhere: the ranks have no staging slots."""
        return ""

    def close_session(self, peer: Incarnation) -> None:
        """There is none into staging slots."""
        self._post(SessionClosed(peer))

    def open(self, peer: Incarnation, *endpoints: str, staging: str = "") -> None:
        """Make each rank ready to send to its counterpart. With another number of endpoints nothing can be sent."""
        if len(endpoints) != self._team.size:
            return
        self._own.open(peer, endpoints[0])
        for rank, endpoint in enumerate(endpoints[1:], start=1):
            self._team.tell(OpenPeer(peer, endpoint), rank)

    def close_peer(self, peer: Incarnation) -> None:
        """Nothing goes to this life any more, from no rank."""
        self._own.close_peer(peer)
        self._team.tell(ClosePeer(peer))

    def send(self, piece: Piece, block_table: tuple[int, ...], slots: tuple[int, ...] = ()) -> None:
        """Every rank sends its part; PieceSent when all have read it."""
        with self._lock:
            self._tally.send(piece)
        self._team.tell(SendKv(PieceHeader.of(piece), block_table))
        self._own.send(piece, block_table)

    def stop(self, key: TransferKey) -> None:
        """No rank reads for this key any more; PiecesStopped when all have said so."""
        with self._lock:
            self._tally.stop(key)
        self._team.tell(StopKv(key))
        self._own.stop(key)

    def expect(
        self, key: TransferKey, block_table: tuple[int, ...], first_token: int = 0, slots: tuple[int, ...] = ()
    ) -> None:
        """When it returns, every rank takes pieces of this key."""
        with self._lock:
            self._tally.expect(key)
        self._own.expect(key, block_table, first_token)
        self._team.call(lambda call: ExpectKv(call, key, block_table, first_token))

    def forget(self, key: TransferKey) -> None:
        """When it returns, no rank writes for this key any more."""
        with self._lock:
            self._tally.forget(key)
        self._own.forget(key)
        self._team.call(lambda call: ForgetKv(call, key))

    def close(self) -> None:
        """Close rank 0's own mover, and end the other ranks."""
        self._own.close()
        self._team.close()

    def check_invariants(self) -> None:
        """Those of what is counted."""
        with self._lock:
            self._tally.check_invariants()

    # -- from other threads

    def on_rank_event(self, rank: int, event: KvEvent) -> None:
        """A rank's mover said something."""
        with self._lock:
            for meant in self._tally.handle(rank, event):
                self._post(meant)

    def on_team_lost(self, reason: str) -> None:
        """The node cannot go on."""
        self._post(EngineFailed(reason))
