"""`kvferry bench perplexity`: what fewer bits for the weights cost a model in accuracy."""

import argparse
import os
import sys
from pathlib import Path

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.host import probe_host
from kvferry.ops.cli.errors import DONE
from kvferry.ops.cli.node import set_thread_variables
from kvferry.ops.cli.numbers import (
    at_least,
    positive,
)

DEFAULT_TEXT = Path(__file__).parents[1] / "bench" / "perplexity.txt"
"""Written for this, and never changed: only figures of the same text can be compared."""
_LEAST_TOKENS = 2
_tokens = at_least(_LEAST_TOKENS)


def add_parser(subjects: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subject."""
    parser = subjects.add_parser(
        "perplexity",
        help="accuracy of quantised weights: the perplexity of a text",
        description="Measures how well the model foretells a text with full weights, int8, int4 and int8_dynamic.",
    )
    parser.add_argument(
        "--model", metavar="DIR_OR_GGUF", help="a HuggingFace directory or GGUF file; default: a small one"
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights and cache")
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: one that never changes, in English")
    parser.add_argument("--tokens", type=_tokens, default=4096, metavar="N", help="of the text at most (4096)")
    parser.add_argument("--window", type=_tokens, default=1024, metavar="W", help="tokens foretold together (1024)")
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
    from kvferry.ops.bench.perplexity import run_perplexity, table
    from kvferry.ops.cli.pluralize import pluralize
    from kvferry.ops.model_choice import option_model

    path = option_model(args.model)
    text = args.text or DEFAULT_TEXT
    ids = load_tokenizer(path).encode(_read(text))[: args.tokens]
    if len(ids) < _LEAST_TOKENS:
        raise ConfigError(f"--text: {text} has {pluralize(len(ids), 'token')}, at least {_LEAST_TOKENS} are needed")
    device = select_device("cpu", threads)
    dtype = None if args.dtype == "auto" else args.dtype
    report = run_perplexity(path, device, dtype, (text.name, ids), args.window, sys.stderr.isatty())
    print(msgspec.json.encode(report).decode() if args.json else "\n".join(table(report)))
    return DONE


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--text: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text: {path} is no text in UTF-8: byte {error.start} begins no character") from None
