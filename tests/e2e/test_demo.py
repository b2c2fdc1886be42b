"""`kvferry demo` as a user runs it, with the real model: its tokens are the reference's greedy ones, all is stopped."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.common.tokenizer import load_tokenizer
from kvferry.ops.cli.chat import chat_prompt
from tests.support.real_model import real_model_path

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]
QUESTION = "Name three rivers of Europe."
NEW_TOKENS = 40
NEAR_TIE = 0.5
"""The demo computes in bfloat16: where two tokens are this close in float32 logits, either may come."""
DEADLINE_S = 500.0


@pytest.fixture
def demo(tmp_path: Path) -> list[str]:
    """The lines that the demo printed. Everything temporary of it lay in a directory that is empty again."""
    command = (
        sys.executable,
        "-m",
        "kvferry.ops.cli.main",
        "demo",
        "--question",
        QUESTION,
        "--max-new-tokens",
        str(NEW_TOKENS),
    )
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    return done.stdout.splitlines()


def short_of_best(prompt: list[int], output: list[int]) -> list[float]:
    """For each output token: how much less its logit is than the best one, by transformers in float32."""
    path = real_model_path()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]]), logits_to_keep=len(output), use_cache=False).logits[0]
    shortfall: list[float] = (logits.max(dim=1).values - logits[range(len(output)), output]).tolist()
    return shortfall


def test_demo(demo: list[str]) -> None:
    (ids_line,) = (line for line in demo if line.startswith("ids "))
    ids: list[int] = ast.literal_eval(ids_line.removeprefix("ids "))
    tokenizer = load_tokenizer(real_model_path())
    text = tokenizer.decode(ids)
    assert demo.count(text.splitlines()[0]) == 1, "it was streamed as text, and is not shown again"
    assert not any(line.startswith("text ") for line in demo)
    assert "nodes  prefill=prefill-0 decode=decode-0" in demo
    assert any(line.startswith("TTFT ") for line in demo)
    assert any(line.startswith("TPOT ") for line in demo)
    assert demo[-1] == "stopped"
    assert 1 < len(ids) <= NEW_TOKENS
    assert all(shortfall < NEAR_TIE for shortfall in short_of_best(chat_prompt(tokenizer, QUESTION), ids))
