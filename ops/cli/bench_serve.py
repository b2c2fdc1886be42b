"""`kvferry bench serve`: what a running server gives its clients, ours or an OpenAI-style one."""

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
    """Declare the subject."""
    parser = subjects.add_parser(
        "serve",
        help="a running server: first tokens, gaps, tokens a second",
        description="Sends streamed requests with random prompts to a running server and measures the time to the "
        "first token, the gaps between tokens, whole requests and tokens a second. Speaks this project's token API "
        "and OpenAI's completions with token ids. Every key of --json: ops/docs/bench.md.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:1025", help="the server (http://127.0.0.1:1025)")
    parser.add_argument("--model", required=True, metavar="NAME", help="the model's name there")
    parser.add_argument("--api", choices=("auto", "infer", "openai"), default="auto", help="auto asks the server")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--concurrency", type=positive, metavar="N", help="closed loop: so many requests at once (1)")
    shape.add_argument("--rate", type=above_zero, metavar="R", help="open loop: requests a second, Poisson arrivals")
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="how many; default: four for each of --concurrency, or of those that --rate sends in a second",
    )
    parser.add_argument("--input-len", type=positive, default=256, metavar="A", help="tokens of a prompt (256)")
    parser.add_argument("--output-len", type=positive, default=64, metavar="B", help="most tokens of an answer (64)")
    parser.add_argument(
        "--warmup",
        type=count,
        metavar="N",
        help="requests before that, not counted; default: --concurrency, or what --rate sends in a second, at most 8",
    )
    parser.add_argument("--seed", type=whole, default=1, help="of prompts and arrivals (1)")
    parser.add_argument(
        "--vocab-size",
        type=positive,
        default=0,
        metavar="V",
        help="prompts have ids below this; default: as the server says, else 1000",
    )
    parser.add_argument("--timeout", type=above_zero, default=600.0, metavar="S", help="of one request, seconds (600)")
    parser.add_argument("--ignore-eos", action="store_true", help="ask an OpenAI-style server to go on to --output-len")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import msgspec

    from kvferry.ops.bench.serve.report import table

    report = asyncio.run(_with_progress(_wanted(args)))
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        print("\n".join(table(report)))
    return DONE


async def _with_progress(bench: "ServeBench") -> "ServeReport":
    from tqdm import tqdm

    from kvferry.ops.bench.serve.run import measure

    with tqdm(total=bench.load.requests, desc="serve", unit="request", disable=not sys.stderr.isatty()) as bar:
        return await measure(bench, lambda _: bar.update())


def _wanted(args: argparse.Namespace) -> "ServeBench":
    from kvferry.ops.bench.serve.load import RequestLoad
    from kvferry.ops.bench.serve.run import ServeBench

    concurrency = None if args.rate is not None else args.concurrency or 1
    at_once = concurrency or max(1, math.ceil(args.rate or 0))
    load = RequestLoad(
        requests=args.requests or 4 * at_once,
        input_len=args.input_len,
        output_len=args.output_len,
        concurrency=concurrency,
        rate=args.rate,
        seed=args.seed,
        vocab_size=args.vocab_size,
    )
    warmup = min(at_once, concurrency or _OPEN_WARMUP) if args.warmup is None else args.warmup
    return ServeBench(args.url, args.model, args.api, load, warmup, args.timeout, args.ignore_eos)
