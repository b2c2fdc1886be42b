"""How sockets between the ranks of one node are set up. They are processes of one host that live and die together.

Whether a rank lives is told by its process, so no heartbeat ends a connection: a rank that was stopped for a while and
goes on has lost no message.
"""

from kvferry.common.transport.options import SocketOptions

_NEVER_S = 1_000_000.0

RANK_OPTIONS = SocketOptions(
    high_water=100_000,
    max_frame_bytes=268_435_456,
    heartbeat_s=0.0,
    heartbeat_timeout_s=_NEVER_S,
    reconnect_min_s=0.01,
    reconnect_max_s=0.1,
)
"""Plans and commands are small, and a rank that does not take them stops the node's engine, which is noticed."""
