"""Real rank processes: the engine over them, and how they all end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from kvferry.common.base.ids import new_incarnation
from kvferry.common.ranks.messages import ExpectKv, ForgetKv
from kvferry.common.ranks.team import RankLostError, RankTeam
from kvferry.common.scheduling.step import BlockCopies, StepBatch
from tests.support.kv_memory import key_between
from tests.support.processes import has_ended
from tests.support.rank_team import BLOCK_SIZE, LOG, running_team, spec_of
from tests.support.serve import wait_until
from tests.support.tiny_llama import greedy_after, make_checkpoint, random_prompt

pytestmark = pytest.mark.slow


def ranks_of(pid: int) -> list[psutil.Process]:
    """Rank processes that process `pid` started."""
    return [child for child in psutil.Process(pid).children() if "kvferry.common.ranks.agent" in child.cmdline()]


def open_descriptors() -> int:
    """Number of sockets, pollers and process handles. (Pipes do not count: torch's first process group leaves one.)"""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "anon_inode:"))
    return count


@pytest.fixture(autouse=True)
def no_leaks():
    """No process, descriptor or thread is left after a test."""
    before = open_descriptors()
    yield
    assert ranks_of(os.getpid()) == []
    assert "ranks" not in [thread.name for thread in threading.enumerate()]
    wait_until(lambda: open_descriptors() <= before, "every socket is closed")


def test_the_engine_over_three_processes_ends_when_one_is_killed(tmp_path: Path) -> None:
    """A step that waits for the dead rank fails immediately, and the other ranks end."""
    reference = make_checkpoint(tmp_path, num_key_value_heads=3, intermediate_size=81)
    prompt = random_prompt(4, 30)
    with running_team(tmp_path, 3) as (_, driver, listener):
        sequence = driver.add(prompt)
        driver.generate([sequence], 6, chunk=8)
        assert sequence.output == greedy_after(reference, prompt, sequence.output)
        first, second = ranks_of(os.getpid())
        # Neither answers, so the step below is waiting when one dies; the suspended other one cannot end by itself.
        first.suspend()
        second.suspend()
        killer = threading.Timer(0.3, first.kill)
        killer.start()
        with pytest.raises(RuntimeError):
            driver.generate([sequence], 12)
        killer.join()
        wait_until(lambda: has_ended(second), "the other rank ends")
        wait_until(lambda: bool(listener.lost), "the listener is notified")
    assert listener.lost == [f"rank 1 (process {first.pid}) was killed by SIGKILL"]


def test_every_rank_swaps_its_part_and_a_step_of_copies_alone_waits_for_all_ranks(tmp_path: Path) -> None:
    """Swap out, then in to other blocks, after another sequence has overwritten the first ones."""
    make_checkpoint(tmp_path)
    prompt = random_prompt(4, 14)
    with running_team(tmp_path, 2) as (_, driver, _):
        undisturbed, sequence = driver.add(prompt), driver.add(prompt)
        driver.generate([undisturbed], 12)
        driver.generate([sequence], 6)
        swapped, host = tuple(sequence.blocks), tuple(range(len(sequence.blocks)))
        driver.runner.execute(StepBatch(90, (), swap_out=(BlockCopies(sequence.seq_id, swapped, host),)))
        driver.release(sequence)
        other = driver.add(random_prompt(5, 20))
        driver.generate([other], 2)
        assert set(other.blocks) & set(swapped)
        driver.reserve(sequence, len(swapped) * BLOCK_SIZE)
        back = BlockCopies(sequence.seq_id, tuple(sequence.blocks), host)
        driver.runner.execute(StepBatch(91, (), swap_in=(back,)))
        driver.generate([sequence], 12)
        assert sequence.output == undisturbed.output
        (rank,) = ranks_of(os.getpid())
        rank.suspend()
        killer = threading.Timer(0.2, rank.kill)
        killer.start()
        with pytest.raises(RuntimeError):
            driver.runner.execute(StepBatch(92, (), swap_in=(back,)))
        killer.join()


def test_a_call_waits_for_every_rank_and_returns_when_the_team_is_lost(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    key = key_between(new_incarnation(), new_incarnation())
    with running_team(tmp_path, 2) as (team, _, listener):
        (rank,) = ranks_of(os.getpid())
        rank.suspend()
        caller = threading.Thread(target=team.call, args=(lambda call: ExpectKv(call, key, (1, 2), 0),))
        caller.start()
        caller.join(0.3)
        assert caller.is_alive(), "it returned although the rank is suspended"
        rank.resume()
        caller.join()
        assert listener.lost == []
        rank.suspend()
        killer = threading.Timer(0.2, rank.kill)
        killer.start()
        team.call(lambda call: ForgetKv(call, key))
        killer.join()
    assert len(listener.lost) == 1


def test_a_rank_that_cannot_load_reports_why(tmp_path: Path) -> None:
    team = RankTeam(spec_of(tmp_path / "nothing", 2), LOG)
    try:
        team.start()
        with pytest.raises(RankLostError, match=r"rank 1: .*nothing is neither a directory nor a GGUF file"):
            team.wait_loaded()
    finally:
        team.close()


_LEAD = """
import sys
from pathlib import Path
from tests.support.kv_memory import key_between
from tests.support.processes import has_ended
from tests.support.rank_team import running_team
with running_team(Path(sys.argv[1]), 2):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_ranks_end_with_the_process_of_rank_0(tmp_path: Path) -> None:
    """It is killed without sending Quit; even a suspended rank ends."""
    make_checkpoint(tmp_path)
    command = (sys.executable, "-c", _LEAD, str(tmp_path))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as lead:
        assert lead.stdout is not None
        assert lead.stdout.readline() == b"ready\n"
        (rank,) = ranks_of(lead.pid)
        rank.suspend()
        lead.send_signal(signal.SIGKILL)
        lead.wait()
    wait_until(lambda: has_ended(rank), "the rank ends")
