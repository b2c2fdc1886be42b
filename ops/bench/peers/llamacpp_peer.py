"""llama.cpp's server in this process, through the package `xllamacpp`. The times are those that the server reports."""

import statistics
from concurrent.futures import ThreadPoolExecutor

import xllamacpp

from kvferry.ops.bench.peers.spec import PeerTask

_MS = 1000.0
_MARGIN_TOKENS = 32
_BATCH = 2048
"""llama.cpp's default batch size, in tokens."""


class LlamaCppPeer:
    """Implements Peer. Runs one server at a time: the number of sequences is fixed at its start."""

    version = xllamacpp.__version__

    def __init__(self, task: PeerTask) -> None:
        self._task = task
        self._shape = (0, 0)
        self._server: xllamacpp.Server | None = None
        self._start(1, task.prompt_room)

    def prompt(self, tokens: list[int]) -> float:
        """The server's own time of the prompt."""
        self._start(1, self._task.prompt_room)
        return float(self._complete(tokens, 1)["prompt_ms"]) / _MS

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Send the prompts twice: the second time they are cached, so all sequences decode together from the start."""
        self._start(len(prompts), self._task.decode_room)
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: self._complete(prompt, 1), prompts))
            timings = list(pool.map(lambda prompt: self._complete(prompt, 2 * steps), prompts))
        return statistics.median(float(timing["predicted_per_token_ms"]) for timing in timings) / _MS

    def _complete(self, prompt: list[int], new: int) -> dict[str, float]:
        assert self._server is not None
        request = {"prompt": prompt, "n_predict": new, "temperature": 0, "cache_prompt": True, "ignore_eos": True}
        answer = self._server.handle_completions(request)
        if "timings" not in answer:
            raise RuntimeError(f"llama.cpp: {answer}")
        timings: dict[str, float] = answer["timings"]
        return timings

    def _start(self, slots: int, room: int) -> None:
        if self._shape == (slots, room):
            return
        self._server = None
        task, params = self._task, xllamacpp.CommonParams()
        params.model.path = task.model
        params.n_parallel = slots
        params.n_ctx = slots * (room + _MARGIN_TOKENS)
        params.n_batch = max(_BATCH, room)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task.threads
        params.cache_ram_mib = 0
        self._server, self._shape = xllamacpp.Server(params), (slots, room)


def load(task: PeerTask) -> LlamaCppPeer:
    """Raises RuntimeError if it cannot read the model."""
    return LlamaCppPeer(task)
