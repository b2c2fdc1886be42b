"""How a node's process ends."""

import subprocess
import sys
from pathlib import Path

from tests.support.eventually import PATIENCE_S

_COMPUTES_ON = """
import logging, sys, threading, torch
from kvferry.common.engine.engine_thread import EngineThread
from kvferry.common.node.process import last_word
from kvferry.common.scheduling.step import StepBatch

begun = threading.Event()
x = torch.randn(64, 64)

class Endless:
    def execute(self, plan, on_layers_done):
        begun.set()
        while True:
            torch.mm(x, x).sum()

def main():
    engine = EngineThread(Endless(), lambda: None, print, logging.getLogger("test"))
    engine.start()
    engine.submit(StepBatch(1, ()))
    begun.wait()
    return last_word(7, computes_on=not engine.stop(0.0))

sys.exit(main())
"""


def test_a_node_whose_engine_computes_on_ends_with_its_own_exit_code() -> None:
    """And not by a signal: Python's end would stop the engine's thread within torch."""
    ended = subprocess.run(
        [sys.executable, "-c", _COMPUTES_ON],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (7, "")
