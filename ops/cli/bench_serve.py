"""`kvferry bench serve`: measures a running server, kvferry or one with an OpenAI-style API, from the client's side."""

import argparse
import asyncio
import math
import sys
from typing import TYPE_CHECKING

from kvferry.ops.cli.errors import DONE
from kvferry.ops.cli.numbers import above_zero, count, positive, whole

if TYPE_CHECKING:
    from kvferry.ops.bench.serve.report import ServeReport
    from kvferry.ops.bench.serve.run import ServeBench

_OPEN_WARMUP = 8


def add_parser(subjects: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subjects.add_parser(
        "serve",
        help="latency and throughput of a running server: TTFT, ITL, tokens per second",
        description="Sends streamed requests with random prompts to a running server and measures the time to the "
        "first token (TTFT), the times between tokens (ITL), the time of whole requests, and tokens per second. Speaks "
        "kvferry's token API and OpenAI completions with token ids. The keys of --json: ops/docs/bench.md.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:1025", help="URL of the server (http://127.0.0.1:1025)")
    parser.add_argument("--model", required=True, metavar="NAME", help="the model's name at the server")
    parser.add_argument(
        "--api", choices=("auto", "infer", "openai"), default="auto", help="the server's API; auto: detect it (auto)"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--concurrency", type=positive, metavar="N", help="closed loop: N concurrent requests (1)")
    shape.add_argument("--rate", type=above_zero, metavar="R", help="open loop: requests per second, Poisson arrivals")
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="number of requests; default: 4 times --concurrency, or 4 times --rate",
    )
    parser.add_argument("--input-len", type=positive, default=256, metavar="A", help="tokens per prompt (256)")
    parser.add_argument("--output-len", type=positive, default=64, metavar="B", help="most tokens per answer (64)")
    parser.add_argument(
        "--warmup",
        type=count,
        metavar="N",
        help="requests sent before the measurement; default: --concurrency, or --rate but at most 8",
    )
    parser.add_argument("--seed", type=whole, default=1, help="seed of prompts and arrival times (1)")
    parser.add_argument(
        "--vocab-size",
        type=positive,
        default=0,
        metavar="V",
        help="prompts have token ids below V; default: the size that the server reports, else 1000",
    )
    parser.add_argument("--timeout", type=above_zero, default=600.0, metavar="S", help="seconds per request (600)")
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="ask an OpenAI-style server to ignore EOS and generate --output-len tokens",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import msgspec

    from kvferry.ops.bench.serve.report import serve_table

    report = asyncio.run(_with_progress(_bench_of(args)))
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(serve_table(report)))
    return DONE


async def _with_progress(bench: "ServeBench") -> "ServeReport":
    from tqdm import tqdm

    from kvferry.ops.bench.serve.run import measure_server

    with tqdm(total=bench.load.requests, desc="serve", unit="request", disable=not sys.stderr.isatty()) as bar:
        return await measure_server(bench, lambda _: bar.update())


def _bench_of(args: argparse.Namespace) -> "ServeBench":
    from kvferry.ops.bench.serve.load import RequestLoad
    from kvferry.ops.bench.serve.run import ServeBench

    concurrency = None if args.rate is not None else args.concurrency or 1
    sent_together = concurrency or max(1, math.ceil(args.rate or 0))
    load = RequestLoad(
        requests=args.requests or 4 * sent_together,
        input_len=args.input_len,
        output_len=args.output_len,
        concurrency=concurrency,
        rate=args.rate,
        seed=args.seed,
        vocab_size=args.vocab_size,
    )
    warmup = min(sent_together, concurrency or _OPEN_WARMUP) if args.warmup is None else args.warmup
    return ServeBench(args.url, args.model, args.api, load, warmup, args.timeout, args.ignore_eos)
