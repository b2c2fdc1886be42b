"""Measures how arriving long prompts stall running streams, on disaggregated and on colocated nodes.

Run as `python -m kvferry.ops.bench.interference`.

Starts a cluster of two nodes on this machine for each layout in turn. Streams run in a closed loop, first alone, then
while long prompts with short answers arrive in an open loop (Poisson). Compares the times between tokens of the
streams (ITL), and the prompts' times to the first token (TTFT).
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvferry.common.base.errors import ConfigError, KvferryError
from kvferry.ops.bench.serve.dialect import InferDialect
from kvferry.ops.bench.serve.load import RequestLoad, prompts, run_load
from kvferry.ops.bench.serve.report import Frame, ServeReport, Spread, make_report
from kvferry.ops.bench.serve.request import Requester, RequestOutcome
from kvferry.ops.bench.serve.run import ServeBench, measure_server
from kvferry.ops.cli.errors import DONE, report
from kvferry.ops.cli.numbers import above_zero, positive, whole
from kvferry.ops.cli.target import parse_url
from kvferry.ops.launcher.started import started_cluster
from kvferry.ops.model_choice import option_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LAYOUTS: dict[str, tuple[str, ...]] = {
    "split": ("--prefill", "1", "--decode", "1"),
    "colocated": ("--colocated", "2"),
    "colocated, small steps": ("--colocated", "2", "--set", "colocated.max_step_tokens=64"),
}
_TIMEOUT_S = 600
_FEW_IDS = 100
"""Vocabulary of the prompts: every model has more ids."""
_MANY_PROMPTS = 64
"""Prompts generated together; more follow after these have been answered."""
_PROMPT_ANSWER = 2
_NO_MATPLOTLIB = "--plot requires matplotlib: pip install -e '.[plot]' in kvferry's directory"


class Side(msgspec.Struct, frozen=True):
    """Results of one layout."""

    layout: str
    command: tuple[str, ...]
    """Arguments of `kvferry serve`."""
    alone: ServeReport
    """The streams without prompts."""
    disturbed: ServeReport
    """The streams while prompts arrive."""
    prompts: ServeReport
    """The prompts that were answered while the streams ran."""


@dataclass(frozen=True, slots=True)
class InterferenceLoad:
    """The two loads that are sent."""

    streams: RequestLoad
    prompts: RequestLoad


async def measure_interference(
    url: str, model: str, load: InterferenceLoad
) -> tuple[ServeReport, ServeReport, ServeReport]:
    """Measure a running cluster: streams alone, streams while prompts arrive, and the prompts.

    Raises KvferryError if no prompt was answered.
    """
    bench = ServeBench(url, model, "infer", load.streams, load.streams.concurrency or 1, _TIMEOUT_S)
    alone = await measure_server(bench, lambda _: None)
    ended: list[RequestOutcome] = []
    arriving = asyncio.create_task(_disturb(url, model, load.prompts, ended))
    try:
        disturbed = await measure_server(bench, lambda _: None)
    finally:
        arriving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await arriving
    if not ended:
        raise KvferryError("no prompt was answered while the streams ran; increase --requests or --rate")
    return alone, disturbed, make_report(Frame(url, model, "infer", 0, 0.0), load.prompts, ended)


async def _disturb(url: str, model: str, load: RequestLoad, ended: list[RequestOutcome]) -> None:
    """Send prompts until cancelled."""
    dialect = InferDialect(model, _TIMEOUT_S)
    requester = Requester(parse_url(url), dialect, _TIMEOUT_S)
    try:
        for salt in count():
            bodies = [dialect.body(ids, load.output_len) for ids in prompts(load, load.requests, f"prompts {salt}")]
            await run_load(requester, load, bodies, ended.append)
    finally:
        requester.close()


def interference_table(sides: Sequence[Side]) -> Iterator[str]:
    """The results as lines of text."""
    head = ("ms", "alone p50", "p99", "disturbed p50", "p99", "max", "prompt TTFT p50", "p99", "answered")
    yield f"{head[0]:<22}" + "".join(f"{word:>16}" for word in head[1:])
    for side in sides:
        alone, disturbed, first = _known(side.alone.itl_ms), _known(side.disturbed.itl_ms), _known(side.prompts.ttft_ms)
        cells = (alone.p50, alone.p99, disturbed.p50, disturbed.p99, disturbed.max, first.p50, first.p99)
        failed = side.prompts.failed + side.disturbed.failed + side.alone.failed
        answered = f"{side.prompts.completed}" + (f", {failed} failed" if failed else "")
        yield f"{side.layout:<22}" + "".join(f"{cell:>16.1f}" for cell in cells) + f"{answered:>16}"


def plot(sides: Sequence[Side], path: Path) -> None:
    """Plot both times as bars. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(_NO_MATPLOTLIB) from None
    figure = Figure(figsize=(10, 4), layout="constrained")
    between, first = figure.subplots(1, 2)
    _bars(between, sides, {
        "alone, p50": [_known(side.alone.itl_ms).p50 for side in sides],
        "alone, p99": [_known(side.alone.itl_ms).p99 for side in sides],
        "with prompts, p50": [_known(side.disturbed.itl_ms).p50 for side in sides],
        "with prompts, p99": [_known(side.disturbed.itl_ms).p99 for side in sides],
    })  # fmt: skip
    between.set_yscale("log")
    between.set_title("time between tokens of a stream (ITL), ms")
    _bars(first, sides, {
        "p50": [_known(side.prompts.ttft_ms).p50 for side in sides],
        "p99": [_known(side.prompts.ttft_ms).p99 for side in sides],
    })  # fmt: skip
    first.set_title("time to first token of a long prompt (TTFT), ms")
    figure.savefig(path, dpi=110)


def _bars(axis: "Axes", sides: Sequence[Side], rows: dict[str, list[float]]) -> None:
    width = 0.8 / len(rows)
    for number, (label, values) in enumerate(rows.items()):
        axis.bar([index + number * width for index in range(len(sides))], values, width, label=label)
    axis.set_xticks([index + 0.4 - width / 2 for index in range(len(sides))], [side.layout for side in sides])
    axis.legend(fontsize="small")


def _known(times: Spread | None) -> Spread:
    """The times, which exist if answers have more than one token. Raises KvferryError otherwise."""
    if times is None:
        raise KvferryError("nothing was measured: the answers were too short; increase --output-len")
    return times


def main() -> int:
    """Measure, print, and write the files; returns the exit code."""
    args = _parser().parse_args()
    try:
        _check(args)
        sides = [_run(layout, args) for layout in args.layout or LAYOUTS]
        sys.stdout.write("\n".join(interference_table(sides)) + "\n")
        if args.json is not None:
            args.json.write_bytes(msgspec.json.format(msgspec.json.encode(sides)) + b"\n")
        if args.plot is not None:
            plot(sides, args.plot)
    except KvferryError as error:
        return report(error, "kvferry.ops.bench.interference", debug=False)
    return DONE


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError now for what would fail only after the measurement."""
    if args.model:
        option_model(args.model)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option}: {path.parent} is not a directory")
    if args.plot is not None and find_spec("matplotlib") is None:
        raise ConfigError(_NO_MATPLOTLIB)


def _run(layout: str, args: argparse.Namespace) -> Side:
    command = (*LAYOUTS[layout], "--dtype", args.dtype, *(("--model", str(args.model)) if args.model else ()))
    streams = RequestLoad(args.requests, args.stream_len, args.output_len, args.streams, None, args.seed, _FEW_IDS)
    disturbing = RequestLoad(_MANY_PROMPTS, args.prompt_len, _PROMPT_ANSWER, None, args.rate, args.seed, _FEW_IDS)
    with started_cluster(*command) as (url, model):
        return Side(
            layout, command, *asyncio.run(measure_interference(url, model, InterferenceLoad(streams, disturbing)))
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvferry.ops.bench.interference", description=__doc__)
    parser.add_argument(
        "--model", metavar="DIR_OR_GGUF", help="a HuggingFace directory or GGUF file; default: the small real model"
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="layout to measure; may be repeated (all)")
    parser.add_argument("--streams", type=positive, default=4, metavar="N", help="concurrent streams (4)")
    parser.add_argument("--requests", type=positive, default=12, metavar="N", help="total number of streams (12)")
    parser.add_argument(
        "--stream-len", type=positive, default=32, metavar="A", help="tokens of each stream's prompt (32)"
    )
    parser.add_argument(
        "--output-len", type=positive, default=128, metavar="B", help="tokens of each stream's answer (128)"
    )
    parser.add_argument(
        "--prompt-len", type=positive, default=512, metavar="L", help="tokens of each long prompt (512)"
    )
    parser.add_argument("--rate", type=above_zero, default=0.2, metavar="R", help="long prompts per second (0.2)")
    parser.add_argument("--seed", type=whole, default=1, help="seed of prompts and arrival times (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE (keys: ops/docs/bench.md)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot the report (requires matplotlib)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
