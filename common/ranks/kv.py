"""The KV mover of a tensor-parallel node: each rank moves its own part, the node gets one event per piece.

Called by the node's control thread; events come in on the threads of rank 0's mover and of the team.
"""

import threading
from collections.abc import Callable

from kvferry.common.base.ids import Incarnation, TransferKey
from kvferry.common.cluster.events import EngineFailed, Event, SessionClosed
from kvferry.common.kv_transfer.interface import KvEvent, KvMover
from kvferry.common.protocol.messages import Piece
from kvferry.common.ranks.messages import ClosePeer, ExpectKv, ForgetKv, OpenPeer, PieceHeader, SendKv, StopKv
from kvferry.common.ranks.tally import PieceTally
from kvferry.common.ranks.team import RankTeam

PostEvent = Callable[[Event], None]


class RankedKvMover:
    """Implements KvMover on rank 0. `make_local` makes the mover of rank 0's own part.

    Rank i sends to rank i: Hello has checked that both nodes have the same number of ranks.
    """

    def __init__(
        self, team: RankTeam, make_local: Callable[[Callable[[KvEvent], None]], KvMover], post: PostEvent
    ) -> None:
        self._team = team
        self._post = post
        self._tally = PieceTally(team.size)
        self._lock = threading.Lock()
        self._local = make_local(lambda event: self.on_rank_event(0, event))

    def start(self) -> str:
        """Bind rank 0's mover and return its endpoint. The movers of the other ranks are already running."""
        endpoint = self._local.start()
        self._team.set_listener(self)
        return endpoint

    @property
    def staging_address(self) -> str:
        """Nowhere: the ranks have no staging slots."""
        return ""

    def close_session(self, peer: Incarnation) -> None:
        """Post SessionClosed immediately: without staging slots there is no session."""
        self._post(SessionClosed(peer))

    def open(self, peer: Incarnation, *endpoints: str, staging: str = "") -> None:
        """Open the peer's rank i on each rank i. Ignored if the number of endpoints differs from that of the ranks."""
        if len(endpoints) != self._team.size:
            return
        self._local.open(peer, endpoints[0])
        for rank, endpoint in enumerate(endpoints[1:], start=1):
            self._team.send(OpenPeer(peer, endpoint), rank)

    def close_peer(self, peer: Incarnation) -> None:
        """Stop sending to this incarnation, on every rank."""
        self._local.close_peer(peer)
        self._team.send(ClosePeer(peer))

    def send(self, piece: Piece, block_table: tuple[int, ...], slots: tuple[int, ...] = ()) -> None:
        """Send each rank's part; posts PieceSent when all ranks have read theirs."""
        with self._lock:
            self._tally.send(piece)
        self._team.send(SendKv(PieceHeader.of(piece), block_table))
        self._local.send(piece, block_table)

    def stop(self, key: TransferKey) -> None:
        """Stop reading for this key; posts PiecesStopped when all ranks have stopped."""
        with self._lock:
            self._tally.stop(key)
        self._team.send(StopKv(key))
        self._local.stop(key)

    def expect(
        self, key: TransferKey, block_table: tuple[int, ...], first_token: int = 0, slots: tuple[int, ...] = ()
    ) -> None:
        """Returns when every rank accepts pieces of this key."""
        with self._lock:
            self._tally.expect(key)
        self._local.expect(key, block_table, first_token)
        self._team.call(lambda call: ExpectKv(call, key, block_table, first_token))

    def forget(self, key: TransferKey) -> None:
        """Returns when no rank writes for this key any more."""
        with self._lock:
            self._tally.forget(key)
        self._local.forget(key)
        self._team.call(lambda call: ForgetKv(call, key))

    def close(self) -> None:
        """Close rank 0's mover and end the other ranks."""
        self._local.close()
        self._team.close()

    # -- called from other threads

    def on_rank_event(self, rank: int, event: KvEvent) -> None:
        """Handle an event of one rank's mover."""
        with self._lock:
            for combined in self._tally.handle(rank, event):
                self._post(combined)

    def on_team_lost(self, reason: str) -> None:
        """Fail the node's engine: the remaining ranks cannot compute."""
        self._post(EngineFailed(reason))
