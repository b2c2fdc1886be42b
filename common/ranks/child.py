"""The process of one rank, as rank 0 has it: started, watched, killed. Knows nothing of what it does."""

import contextlib
import os
import signal
import subprocess

import msgspec

from kvferry.common.base.ids import (
    Incarnation,
    new_incarnation,
)
from kvferry.common.base.python_command import python_command
from kvferry.common.ranks import messages
from kvferry.common.ranks.messages import Outbound, RankSpec, ToRank


class RankProcess:
    """A running rank and the two directions of messages with it."""

    def __init__(self, rank: int, self_id: Incarnation, process: "subprocess.Popen[bytes]") -> None:
        self.rank = rank
        self.self_id = self_id
        self.outgoing: Outbound[ToRank] = Outbound()
        self.incoming = messages.from_rank()
        self.poll_handle = os.pidfd_open(process.pid)
        """Readable when the process has ended."""
        self._process = process

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._process.poll() is not None

    def ends_within(self, timeout_s: float) -> bool:
        """Whether it is gone by then."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self) -> str:
        """Wait for its end; how it ended, in words."""
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"rank {self.rank} (process {self._process.pid}) {how}"

    def kill(self) -> None:
        """At once, whatever it does; it stays to be waited for."""
        self._process.kill()

    def close(self) -> None:
        """After its end: nothing of it stays."""
        os.close(self.poll_handle)


def start_rank(common: RankSpec, rank: int, lead: str, store_port: int) -> RankProcess:
    """Start a rank. `lead` is where rank 0 listens, `store_port` where the ranks find one another."""
    self_id = new_incarnation()
    spec = msgspec.structs.replace(
        common, rank=rank, self_id=self_id, lead=lead, store_port=store_port, parent_pid=os.getpid()
    )
    threads = str(spec.settings.threads)
    process = subprocess.Popen(
        python_command("kvferry.common.ranks.agent"),
        stdin=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    )
    assert process.stdin is not None
    # One that has ended already is noticed by whoever watches it.
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(msgspec.json.encode(spec))
    return RankProcess(rank, self_id, process)
