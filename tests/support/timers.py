"""Protocol timers for tests in real time: long ones where no process dies, short ones where one does.

On a busy machine a live node may be silent for as long as a dead one. The tests of the cores use the default timers and
a manual clock.
"""

from kvferry.common.config.protocol import Timers

PATIENT = Timers(
    suspect_s=20.0,
    dead_after_s=30.0,
    client_timeout_s=40.0,
    worker_timeout_s=30.0,
    late_tick_s=5.0,
    engine_stall_s=100.0,
    engine_stall_exit_s=200.0,
    reserve_timeout_s=20.0,
    commit_timeout_s=60.0,
    piece_idle_timeout_s=60.0,
    new_request_wait_s=60.0,
    link_timeout_s=60.0,
)
"""For tests in which no process dies: a busy machine must not look like a death."""

FAST = Timers(
    heartbeat_s=0.1,
    suspect_s=0.3,
    dead_after_s=0.6,
    client_timeout_s=0.8,
    worker_timeout_s=0.4,
    late_tick_s=0.4,
    retain_s=1.0,
    new_request_wait_s=60.0,
)
"""The default proportions, five times as fast. A node wrongly considered dead comes back; requests wait for it."""
