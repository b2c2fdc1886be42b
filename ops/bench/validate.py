"""Measures the validation of a large token request: `python -m kvferry.ops.bench.validate`.

Two figures matter: the time relative to msgspec's typed decode of the same body (at most 1.6), and the longest time
that the event loop was blocked while the body was read and checked (at most 5 ms). Runs no server and no model.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from kvferry.common.base.ids import new_request_id
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.ops.cli.numbers import positive
from kvferry.router.http.exchange import AsgiMessage, Exchange
from kvferry.router.http.json_body.reader import read_json_body
from kvferry.router.http.validation import check_infer

CHUNK_BYTES = 65_536
"""About the size of the chunks that an HTTP server passes on."""
_VOCAB_SIZE = 128_000


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[int]


class _Body(msgspec.Struct):
    inputs: list[_Input]
    outputs: list[dict[str, str]]
    id: str = ""
    parameters: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class ValidationTimes:
    """Times of one body in milliseconds, medians over the rounds."""

    bare_ms: float
    checked_ms: float
    longest_block_ms: float
    """Wall time of the longest block of each round, median over the rounds."""
    longest_block_cpu_ms: float
    """CPU time of the loop's thread, so without other programs: the worst of all rounds."""

    @property
    def ratio(self) -> float:
        """Checked over bare."""
        return self.checked_ms / self.bare_ms


def make_body(num_ids: int, separator: str) -> bytes:
    """A valid request with `num_ids` token ids, separated by `separator`."""
    rng = random.Random(num_ids)
    ids = [rng.randrange(_VOCAB_SIZE) for _ in range(num_ids)]
    tensor = {"name": "input0", "shape": [1, num_ids], "datatype": "UINT32", "data": ids}
    body = {"id": "42", "inputs": [tensor], "outputs": [{"name": "output0"}], "parameters": {"temperature": 0.5}}
    return json.dumps(body, separators=(separator, ":")).encode()


async def check_once(body: bytes, num_ids: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Read and check `body` as the router does; returns the number of token ids."""
    chunks = _chunks(body, chunk_bytes)

    async def receive() -> AsgiMessage:
        chunk, more = next(chunks)
        return {"type": "http.request", "body": chunk, "more_body": more}

    model = ModelInfo(
        name="m", vocab_size=_VOCAB_SIZE, max_model_len=num_ids + 64, max_position_embeddings=num_ids + 64
    )
    exchange = Exchange({"headers": [(b"content-length", b"%d" % len(body))]}, receive, new_request_id(), 0.0)
    decoded = await read_json_body(exchange, len(body), model.vocab_size)
    checked = check_infer(
        decoded, model, max_input_length=num_ids, max_iter_times=16, request_id=exchange.request_id, seed=1
    )
    return len(checked.request.spec.prompt_token_ids)


def measure_validation(body: bytes, num_ids: int, rounds: int) -> ValidationTimes:
    """Alternate bare decodes and checks, `rounds` of each."""
    decoder = msgspec.json.Decoder(_Body)
    bare: list[float] = []
    checked: list[float] = []
    blocks: list[tuple[float, float]] = []
    for _ in range(rounds):
        gc.collect()
        bare.append(_time_ms(lambda: decoder.decode(body)))
        gc.collect()
        checked.append(_time_ms(lambda: asyncio.run(check_once(body, num_ids))))
        gc.collect()
        blocks.append(asyncio.run(_longest_block_ms(body, num_ids)))
    longest = statistics.median(wall for wall, _ in blocks)
    longest_cpu = max(cpu for _, cpu in blocks)
    return ValidationTimes(statistics.median(bare), statistics.median(checked), longest, longest_cpu)


async def _longest_block_ms(body: bytes, num_ids: int) -> tuple[float, float]:
    """Longest wait of another task that is always ready: wall time, CPU time."""
    longest = longest_cpu = 0.0
    running = True

    async def watch() -> None:
        nonlocal longest, longest_cpu
        last, last_cpu = time.perf_counter(), time.thread_time()
        while running:
            await asyncio.sleep(0)
            now, now_cpu = time.perf_counter(), time.thread_time()
            longest, longest_cpu = max(longest, now - last), max(longest_cpu, now_cpu - last_cpu)
            last, last_cpu = now, now_cpu

    task = asyncio.get_running_loop().create_task(watch())
    await asyncio.sleep(0)
    await check_once(body, num_ids)
    running = False
    await task
    return longest * 1e3, longest_cpu * 1e3


def _time_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _chunks(body: bytes, chunk_bytes: int) -> Iterator[tuple[bytes, bool]]:
    for start in range(0, len(body), chunk_bytes):
        yield body[start : start + chunk_bytes], start + chunk_bytes < len(body)


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each layout of the body."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.ops.bench.validate", description=__doc__)
    parser.add_argument("--ids", type=positive, default=1_000_000, help="token ids in the prompt (1000000)")
    parser.add_argument("--rounds", type=positive, default=9, help="rounds of each measurement (9)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    results: dict[str, dict[str, float]] = {}
    for name, separator in (("compact", ","), ("spaced", ", "), ("one a line", ",\n          ")):
        body = make_body(options.ids, separator)
        times = measure_validation(body, options.ids, options.rounds)
        results[name] = {
            "body_bytes": len(body),
            "bare_ms": round(times.bare_ms, 2),
            "checked_ms": round(times.checked_ms, 2),
            "ratio": round(times.ratio, 3),
            "longest_block_ms": round(times.longest_block_ms, 2),
            "longest_block_cpu_ms": round(times.longest_block_cpu_ms, 2),
        }
    if options.json:
        sys.stdout.write(json.dumps(results) + "\n")
        return 0
    for name, result in results.items():
        text = "  ".join(f"{key} {value:,}" for key, value in result.items())
        sys.stdout.write(f"{name:<11} {text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
