"""`kvferry demo`: starts a cluster with the small real model, streams one request, and stops the cluster."""

import argparse
import contextlib
from collections.abc import Iterator

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.load import load_config
from kvferry.ops import model_store
from kvferry.ops.cli.errors import DONE
from kvferry.ops.cli.sampling import new_tokens

_QUESTION = "What is the capital of France, and what is it known for?"
_WORKERS, _PREFILL, _DECODE = 2, 1, 1


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "demo",
        help="start a cluster, stream one request, stop",
        description="Starts a router with two workers, a prefill node and a decode node with the small real model, "
        "streams the answer to one question, and stops the cluster.",
    )
    parser.add_argument("--question", default=_QUESTION, help=f"the question ({_QUESTION})")
    parser.add_argument(
        "--max-new-tokens", type=new_tokens, default=64, metavar="N", help="most tokens to generate, at least 1 (64)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from kvferry.common.tokenizer import load_tokenizer
    from kvferry.ops.cli.chat import chat_prompt
    from kvferry.ops.cli.infer import answer_lines, show_stream
    from kvferry.ops.cli.token_client import TokenClient

    tokenizer = load_tokenizer(model_store.ensure_model())
    prompt = chat_prompt(tokenizer, args.question)
    limit = load_config().router.max_input_length
    if len(prompt) > limit:
        raise ConfigError(f"--question: {len(prompt)} tokens; at most {limit} are allowed (router.max_input_length)")
    print(f"starting: router with {_WORKERS} workers, {_PREFILL} prefill node, {_DECODE} decode node", flush=True)
    with _cluster() as (url, model), TokenClient(url, model) as client:
        print(f"ready {url} model={model}\n\n{args.question}  ({len(prompt)} prompt tokens)\n", flush=True)
        answer = show_stream(client, prompt, {"max_new_tokens": args.max_new_tokens}, tokenizer)
        print("\n" + "\n".join(answer_lines(answer, None, args.max_new_tokens)), flush=True)
    return DONE


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[str, str]]:
    """Yields URL and model name; prints `stopped` when the cluster has stopped, also after a failure."""
    from kvferry.ops.launcher.started import started_cluster

    failure: BaseException | None = None
    sizes = ("--workers", str(_WORKERS), "--prefill", str(_PREFILL), "--decode", str(_DECODE))
    with started_cluster(*sizes) as place:
        try:
            yield place
        except BaseException as error:  # noqa: BLE001 - raised again after the stop
            failure = error
    print("stopped", flush=True)
    if failure is not None:
        raise failure
