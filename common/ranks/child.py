"""Rank 0's handle of one rank process: start, watch, kill. Knows nothing of the messages' meaning."""

import contextlib
import os
import signal
import subprocess

import msgspec

from kvferry.common.base.ids import Incarnation, new_incarnation
from kvferry.common.base.python_command import python_command
from kvferry.common.ranks.link import Outbound, from_rank
from kvferry.common.ranks.messages import RankSpec, ToRank


class RankProcess:
    """A started rank process, with the encoder and decoder of its messages."""

    def __init__(self, rank: int, self_id: Incarnation, process: "subprocess.Popen[bytes]") -> None:
        self.rank = rank
        self.self_id = self_id
        self.outbound: Outbound[ToRank] = Outbound()
        self.inbound = from_rank()
        self.poll_handle = os.pidfd_open(process.pid)
        """Becomes readable when the process ends."""
        self._process = process

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ends_within(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the process to end; returns whether it has."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self) -> str:
        """Wait for the process to end; returns a description of how it ended."""
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"rank {self.rank} (process {self._process.pid}) {how}"

    def kill(self) -> None:
        """Send SIGKILL. The caller must still `wait`."""
        self._process.kill()

    def close(self) -> None:
        """Close the poll handle. The process must have ended."""
        os.close(self.poll_handle)


def start_rank(common: RankSpec, rank: int, lead_endpoint: str, store_port: int) -> RankProcess:
    """Start the process of `rank`. `lead_endpoint`: where rank 0 listens; `store_port`: the rendezvous store's."""
    self_id = new_incarnation()
    spec = msgspec.structs.replace(
        common, rank=rank, self_id=self_id, lead_endpoint=lead_endpoint, store_port=store_port, parent_pid=os.getpid()
    )
    threads = str(spec.settings.threads)
    process = subprocess.Popen(
        python_command("kvferry.common.ranks.agent"),
        stdin=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
    )
    assert process.stdin is not None
    # A process that has already ended is detected through its poll handle.
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(msgspec.json.encode(spec))
    return RankProcess(rank, self_id, process)
