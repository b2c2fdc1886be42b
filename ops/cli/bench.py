"""`kvferry bench`: measures the engine, a running server, or the accuracy of quantized weights."""

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
    parser = commands.add_parser(
        "bench",
        help="measure speed or accuracy",
        description="Measures the speed of the engine or of a server, or the accuracy of quantized weights.",
    )
    subjects = parser.add_subparsers(dest="subject", metavar="WHAT", required=True)
    engine = subjects.add_parser(
        "engine",
        help="throughput of the engine: prefill and decode",
        description="Measures tokens per second of prefill (prompts of 128, 512 and 2048 tokens) and of decode "
        "(1, 8 and 32 sequences with 256 tokens of context), and compares each with the limit of this machine (memory "
        "bandwidth, matmul rate), measured in the same run.",
    )
    engine.add_argument(
        "--model", metavar="DIR_OR_GGUF", help="a HuggingFace directory or GGUF file; default: the small real model"
    )
    engine.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="type of weights and KV cache (auto)"
    )
    engine.add_argument(
        "--quantization", choices=("none", "int8", "int4", "int8_dynamic"), default="none", help="of the weights (none)"
    )
    engine.add_argument("--threads", type=positive, metavar="N", help="compute threads; default: all cores")
    engine.add_argument(
        "--tp",
        type=positive,
        default=1,
        metavar="N",
        help="tensor parallel over N processes, which share the threads (1)",
    )
    engine.add_argument(
        "--peers",
        action="store_true",
        help="measure transformers, openvino-genai and xllamacpp (llama.cpp) too, if they are installed",
    )
    engine.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="PATH",
        help="also look for peers in this Python interpreter",
    )
    engine.add_argument("--json", action="store_true", help="print JSON")
    engine.set_defaults(run=run)
    bench_serve.add_parser(subjects)
    bench_perplexity.add_parser(subjects)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    scheme = None if args.quantization == "none" else args.quantization
    if scheme is not None and args.peers:
        raise ConfigError("--peers compares engines with full weights; omit --quantization")
    if args.peer_python and not args.peers:
        raise ConfigError("--peer-python requires --peers")
    threads = args.threads or probe_host().cores
    set_thread_variables(threads)
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

    import msgspec

    from kvferry.ops import model_store
    from kvferry.ops.bench.engine import run_bench
    from kvferry.ops.bench.peers.comparison import compare_with_peers, comparison_table
    from kvferry.ops.bench.peers.run import installed, measure_peers
    from kvferry.ops.bench.ranks import Weights
    from kvferry.ops.bench.report import engine_table
    from kvferry.ops.model_choice import option_model

    path = option_model(args.model)
    name = path.resolve().stem if args.model else model_store.MODEL_NAME
    progress = sys.stderr.isatty()
    peers = installed([sys.executable, *args.peer_python]) if args.peers else {}
    weights = Weights(None if args.dtype == "auto" else args.dtype, scheme)
    done = run_bench(path, threads, weights, name, progress, args.tp)
    if not args.peers:
        print(msgspec.json.encode(done.report).decode() if args.json else "\n".join(engine_table(done.report)))
        return DONE
    outcomes = measure_peers(done.task(path), peers, progress)
    report = msgspec.structs.replace(done.report, peers=[done.peer(outcome) for outcome in outcomes])
    rows = compare_with_peers(report)
    if args.json:
        print(msgspec.json.encode(msgspec.to_builtins(report) | {"rows": rows}).decode())
    else:
        print("\n".join((*engine_table(report), *comparison_table(report, rows))))
    return DONE
