"""The protocol's timers for clusters of real time: patient ones where nobody dies, fast ones where somebody does.

A busy machine makes a node's silence as long as a death is. The tests of the cores have the true timers, and a clock of
their own.
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
"""Nobody dies here: a machine that is busy with other things shall not look like a death."""

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
"""The protocol's proportions, five times as fast. Who is taken for dead and is not comes back; requests wait for it."""
