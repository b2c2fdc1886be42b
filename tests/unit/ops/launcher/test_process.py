"""Child processes: relayed lines, exits, signals, and what happens when the launcher is killed or stopped."""

import asyncio
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvferry.ops.launcher.process import prefixed, start_child
from tests.support.children import SERVES, alive, child, run
from tests.support.eventually import PATIENCE_S
from tests.support.serve import wait_until


def test_the_exit_of_a_child_is_seen_while_its_own_child_holds_the_pipe():
    code = """
        import os, subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid, flush=True)
        os.kill(os.getpid(), 9)
    """

    async def story():
        started = await start_child(child("d", code), lambda name, line: None)
        exit_code, grandchild = await started.wait()
        assert exit_code == -9
        while alive(int(grandchild)):
            await asyncio.sleep(0)

    run(story)


def test_long_unfinished_and_invalid_lines_are_relayed():
    code = r"import sys; sys.stdout.buffer.write(b'x' * 300000 + b'\n\n\xff\nlast')"

    async def story():
        lines: list[str] = []
        started = await start_child(child("d", code), lambda name, line: lines.append(line))
        assert await started.wait() == (0, "last")
        assert lines == ["x" * 300000, "", "\ufffd", "last"]

    run(story)


def test_children_die_with_a_launcher_that_is_killed(tmp_path: Path):
    launcher = f"""
        import asyncio, os, sys
        from kvferry.ops.launcher.core import ChildPlan, Stage
        from kvferry.ops.launcher.process import ChildSpec, start_child

        async def main():
            spec = ChildSpec(ChildPlan("d", Stage.DECODE, 1.0), (sys.executable, "-c", {SERVES.replace("15", "10")!r}))
            child = await start_child(spec, lambda name, line: print(child_pid[0], line, flush=True))
            child_pid.append(child.pid)
            await child.wait()

        child_pid = []
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[0])
        assert alive(pid)
        process.kill()
        process.wait(PATIENCE_S)
    wait_until(lambda: not alive(pid), "the child ends")


def test_directories_are_emptied_at_every_start(tmp_path: Path):
    directory = tmp_path / "metrics"

    async def story():
        for _ in range(2):
            spec = child("r", f"open({str(directory / 'a')!r}, 'x')", fresh_dirs=(directory,))
            started = await start_child(spec, lambda name, line: None)
            assert await started.wait() == (0, "")

    run(story)
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("text", "d-0 | text"),
        ("", "d-0 | "),
        ('{"process":"d-0"}', '{"process":"d-0"}'),
        ("2026-01-01T00:00:00.000Z INFO    d-0 log: a", "2026-01-01T00:00:00.000Z INFO    d-0 log: a"),
    ],
)
def test_lines_have_the_childs_name_once(line: str, shown: str):
    assert prefixed("d-0", line) == shown


def test_a_child_does_not_block_on_a_launcher_that_does_not_read():
    async def story():
        talks = """
            import logging
            from kvferry.common.config.schema import LogConfig
            from kvferry.common.base.log import setup_logging
            setup_logging(LogConfig(), "d")
            for number in range(20_000):
                logging.getLogger("a").info("%0100d", number)
        """
        ended_fd, child_fd = os.pipe()
        ended = asyncio.Event()
        spec = child("d", textwrap.dedent(talks).strip(), pass_fds=(child_fd,))
        process = await start_child(spec, lambda _name, _line: None)
        os.close(child_fd)
        asyncio.get_running_loop().add_reader(ended_fd, ended.set)
        await ended.wait()  # nothing is read before `wait`
        asyncio.get_running_loop().remove_reader(ended_fd)
        os.close(ended_fd)
        assert (await process.wait())[0] == 0

    run(story)
