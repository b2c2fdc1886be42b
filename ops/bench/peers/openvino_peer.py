"""OpenVINO GenAI's continuous-batching pipeline, step by step. Reads GGUF files with 16-bit weights."""

import statistics
import time
from itertools import count

import openvino
import openvino_genai

from kvferry.ops.bench.peers.spec import PeerTask

_BLOCK_SIZE = 32
_MOST_TOKENS = 1 << 14


class OpenVinoPeer:
    """Implements Peer."""

    version = openvino_genai.__version__

    def __init__(self, pipeline: openvino_genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._ids = count()

    def prompt(self, tokens: list[int]) -> float:
        """Seconds until a request of one token has ended."""
        start = time.perf_counter()
        # Dropping the handle would cancel the request.
        handle = self._add(tokens, 1)
        self._finish()
        seconds = time.perf_counter() - start
        if not handle.can_read():
            raise RuntimeError("OpenVINO returned no token for a prompt")
        return seconds

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Timed after all prompts have been computed: earlier steps may include one."""
        handles = [self._add(prompt, 2 * steps + len(prompts)) for prompt in prompts]
        waiting = set(range(len(handles)))
        while waiting:
            self._pipeline.step()
            waiting -= {index for index in waiting if handles[index].can_read()}
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self._pipeline.step()
            times.append(time.perf_counter() - start)
        self._finish()
        return statistics.median(times)

    def _add(self, tokens: list[int], new: int) -> "openvino_genai.py_openvino_genai.GenerationHandle":
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        return self._pipeline.add_request(next(self._ids), openvino.Tensor([tokens]), config)

    def _finish(self) -> None:
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def _blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK_SIZE)


def load(task: PeerTask) -> OpenVinoPeer:
    """Raises RuntimeError if it cannot read the model."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    # A whole prompt in one step, as in the other engines' measurements.
    scheduler.max_num_batched_tokens = _MOST_TOKENS
    sequences = max([*task.batches, 0])
    scheduler.num_kv_blocks = max(_blocks(task.prompt_room), sequences * _blocks(task.decode_room)) + 1
    precision = "bf16" if task.dtype == "bfloat16" else "f32"
    properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": task.threads}
    return OpenVinoPeer(openvino_genai.ContinuousBatchingPipeline(task.model, scheduler, "CPU", properties))
