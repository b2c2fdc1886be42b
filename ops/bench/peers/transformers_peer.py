"""HuggingFace transformers, eager, with its own cache: forward pass and arg-max, as in its `generate`."""

import os
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvferry.ops.bench.peers.spec import PeerTask


class TransformersPeer:
    """Implements Peer."""

    version = transformers.__version__

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def prompt(self, tokens: list[int]) -> float:
        """The whole prompt in one pass, with logits of the last position only."""
        start = time.perf_counter()
        self._step(torch.tensor([tokens]), DynamicCache())
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """All sequences have the same length, so there is no padding."""
        cache = DynamicCache()
        last = self._step(torch.tensor(prompts), cache)
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            last = self._step(last, cache)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _step(self, input_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        with torch.inference_mode():
            out = self._model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        chosen: torch.Tensor = out.logits[:, -1:].argmax(-1)
        return chosen


def load(task: PeerTask) -> TransformersPeer:
    """Load a directory, or a GGUF file with the library's own reader."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(task.threads)
    path = Path(task.model)
    directory, gguf = (path.parent, path.name) if path.is_file() else (path, None)
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=gguf, dtype=getattr(torch, task.dtype))
    # GGUF files are loaded as float32, whatever dtype is requested.
    return TransformersPeer(model.to(getattr(torch, task.dtype)).eval())
