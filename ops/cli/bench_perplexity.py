"""`kvferry bench perplexity`: measures the accuracy of a model with quantized weights."""

import argparse
import os
import sys
from pathlib import Path

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.host import probe_host
from kvferry.ops.cli.errors import DONE
from kvferry.ops.cli.node import set_thread_variables
from kvferry.ops.cli.numbers import at_least, positive

DEFAULT_TEXT = Path(__file__).parents[1] / "bench" / "perplexity.txt"
"""Must never change: only figures of the same text can be compared."""
_LEAST_TOKENS = 2
_tokens = at_least(_LEAST_TOKENS)


def add_parser(subjects: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subjects.add_parser(
        "perplexity",
        help="accuracy of quantized weights: the perplexity of a text",
        description="Measures the perplexity of a text (lower is better) with full, int8, int4, int8_dynamic weights.",
    )
    parser.add_argument(
        "--model", metavar="DIR_OR_GGUF", help="a HuggingFace directory or GGUF file; default: the small real model"
    )
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="type of weights and KV cache (auto)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text file in UTF-8; default: an English text that comes with kvferry"
    )
    parser.add_argument(
        "--tokens", type=_tokens, default=4096, metavar="N", help="most tokens of the text to use (4096)"
    )
    parser.add_argument(
        "--window",
        type=_tokens,
        default=1024,
        metavar="W",
        help="tokens of a window; each is predicted from those before it in the window (1024)",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="compute threads; default: all cores")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    threads = args.threads or probe_host().cores
    set_thread_variables(threads)
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

    import msgspec

    from kvferry.common.device.select import select_device
    from kvferry.common.tokenizer import load_tokenizer
    from kvferry.ops.bench.perplexity import perplexity_table, run_perplexity
    from kvferry.ops.cli.pluralize import pluralize
    from kvferry.ops.model_choice import option_model

    path = option_model(args.model)
    text = args.text or DEFAULT_TEXT
    ids = load_tokenizer(path).encode(_read(text))[: args.tokens]
    if len(ids) < _LEAST_TOKENS:
        raise ConfigError(f"--text: {text} has {pluralize(len(ids), 'token')}; at least {_LEAST_TOKENS} are required")
    device = select_device("cpu", threads)
    dtype = None if args.dtype == "auto" else args.dtype
    report = run_perplexity(path, device, dtype, (text.name, ids), args.window, sys.stderr.isatty())
    print(msgspec.json.encode(report).decode() if args.json else "\n".join(perplexity_table(report)))
    return DONE


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text: {path} is not UTF-8 text: invalid byte at offset {error.start}") from None
