"""The exit code of a node's process."""

import subprocess
import sys
from pathlib import Path

from tests.support.eventually import PATIENCE_S

_ENGINE_STILL_RUNS = """
import logging, sys, threading, torch
from kvferry.common.engine.engine_thread import EngineThread
from kvferry.common.node.process import exit_code
from kvferry.common.scheduling.step import StepBatch

begun = threading.Event()
x = torch.randn(64, 64)

class Endless:
    def execute(self, batch, on_layers_done):
        begun.set()
        while True:
            torch.mm(x, x).sum()

def main():
    engine = EngineThread(Endless(), lambda: None, print, logging.getLogger("test"))
    engine.start()
    engine.submit(StepBatch(1, ()))
    begun.wait()
    return exit_code(7, engine_still_runs=not engine.stop(0.0))

sys.exit(main())
"""


def test_a_node_whose_engine_still_runs_ends_with_its_own_exit_code() -> None:
    """Not by a signal: when Python ends, it stops the engine thread within torch."""
    ended = subprocess.run(
        [sys.executable, "-c", _ENGINE_STILL_RUNS],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (7, "")
