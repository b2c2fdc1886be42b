"""What gunicorn's configuration does around the fork of a worker."""

import signal
import subprocess
import sys

import pytest

FORKED = """
import os, signal, sys
from types import SimpleNamespace
number = int(sys.argv[1])
signal.signal(number, lambda *_: None)  # as the arbiter: noted, and acted upon later
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
print("the parent goes on")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_worker_that_was_just_forked_hears_the_signal_that_ends_it(number: signal.Signals):
    ended = subprocess.run((sys.executable, "-c", FORKED, str(int(number))), capture_output=True, text=True, timeout=60)
    assert (ended.stdout.split("\n"), ended.stderr) == ([str(-number), "the parent goes on", ""], "")
