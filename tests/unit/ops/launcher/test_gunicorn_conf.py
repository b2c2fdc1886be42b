"""gunicorn's configuration around the fork of a worker."""

import signal
import subprocess
import sys

import pytest

FORKED = """
import os, signal, sys
from types import SimpleNamespace
number = int(sys.argv[1])
signal.signal(number, lambda *_: None)  # as in the arbiter: queued for later
from kvferry.ops.launcher.gunicorn_conf import on_starting
on_starting(SimpleNamespace(manage_workers=None, reap_workers=None))
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    while True:
        signal.pause()
os.kill(pid, number)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os.kill(os.getpid(), number)
print("the parent continues")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_stop_signal_ends_a_worker_that_has_just_been_forked(number: signal.Signals):
    ended = subprocess.run((sys.executable, "-c", FORKED, str(int(number))), capture_output=True, text=True, timeout=60)
    assert (ended.stdout.split("\n"), ended.stderr) == ([str(-number), "the parent continues", ""], "")
