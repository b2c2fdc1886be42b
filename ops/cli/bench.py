"""`kvferry bench`: measurements of the engine, of a running server, and of accuracy."""

import argparse
import os
import sys

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.host import probe_host
from kvferry.ops.cli import bench_perplexity, bench_serve
from kvferry.ops.cli.errors import DONE
from kvferry.ops.cli.node import set_thread_variables
from kvferry.ops.cli.numbers import positive


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and what it can measure."""
    parser = commands.add_parser(
        "bench", help="measure speed or accuracy", description="Measures speed, or what fewer bits cost in accuracy."
    )
    subjects = parser.add_subparsers(dest="subject", metavar="WHAT", required=True)
    engine = subjects.add_parser(
        "engine",
        help="the engine by itself: prompts and decoding",
        description="Measures tokens a second of prompts (128, 512, 2048 tokens) and of decoding (1, 8, 32 sequences "
        "with 256 tokens of context), each beside the machine's own limits measured in the same run.",
    )
    engine.add_argument(
        "--model", metavar="DIR_OR_GGUF", help="a HuggingFace directory or GGUF file; default: a small one"
    )
    engine.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights and cache")
    engine.add_argument(
        "--quantization", choices=("none", "int8", "int4", "int8_dynamic"), default="none", help="of the weights"
    )
    engine.add_argument("--threads", type=positive, metavar="N", help="compute threads; default: all cores")
    engine.add_argument(
        "--tp", type=positive, default=1, metavar="N", help="cut the model over N processes, which share the threads"
    )
    engine.add_argument(
        "--peers",
        action="store_true",
        help="also transformers, openvino-genai and xllamacpp (llama.cpp), where installed; installs nothing",
    )
    engine.add_argument(
        "--peer-python", action="append", default=[], metavar="PATH", help="look for peers in this interpreter, too"
    )
    engine.add_argument("--json", action="store_true", help="print JSON")
    engine.set_defaults(run=run)
    bench_serve.add_parser(subjects)
    bench_perplexity.add_parser(subjects)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    scheme = None if args.quantization == "none" else args.quantization
    if scheme is not None and args.peers:
        raise ConfigError("--peers compares engines with full weights: leave --quantization out")
    if args.peer_python and not args.peers:
        raise ConfigError("--peer-python: needs --peers")
    threads = args.threads or probe_host().cores
    set_thread_variables(threads)
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

    import msgspec

    from kvferry.ops import model_store
    from kvferry.ops.bench.engine import run_bench
    from kvferry.ops.bench.peers.comparison import compare, comparison_table
    from kvferry.ops.bench.peers.run import (
        installed,
        measure_peers,
    )
    from kvferry.ops.bench.ranks import Weights
    from kvferry.ops.bench.report import table
    from kvferry.ops.model_choice import option_model

    path = option_model(args.model)
    name = path.resolve().stem if args.model else model_store.MODEL_NAME
    progress = sys.stderr.isatty()
    peers = installed([sys.executable, *args.peer_python]) if args.peers else {}
    weights = Weights(None if args.dtype == "auto" else args.dtype, scheme)
    done = run_bench(path, threads, weights, name, progress, args.tp)
    if not args.peers:
        print(msgspec.json.encode(done.report).decode() if args.json else "\n".join(table(done.report)))
        return DONE
    outcomes = measure_peers(done.task(path), peers, progress)
    report = msgspec.structs.replace(done.report, peers=[done.peer(outcome) for outcome in outcomes])
    rows = compare(report)
    if args.json:
        print(msgspec.json.encode(msgspec.to_builtins(report) | {"rows": rows}).decode())
    else:
        print("\n".join((*table(report), *comparison_table(report, rows))))
    return DONE
