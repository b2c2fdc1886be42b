"""`kvferry demo`: a cluster with the small real model, one streamed request, everything stopped again."""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO

from common.errors import KvferryError
from ops import model_store
from ops.cli.errors import DONE

_QUESTION = "What is the capital of France, and what is it known for?"
_WORKERS, _PREFILL, _DECODE = 2, 1, 1
_STOP_S = 60.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help="start a cluster, send one request, stop",
        description="Starts a router with two workers, a prefill and a decode node with the small real model, streams "
        "the answer to one question, and stops everything.",
    )
    parser.add_argument("--question", default=_QUESTION, help="what to ask")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="most tokens to generate (64)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The whole demonstration."""
    from common.tokenizer import load_tokenizer
    from ops.cli.chat import chat_prompt
    from ops.cli.infer import answer_lines, show_stream
    from ops.cli.token_client import TokenClient

    path = model_store.ensure_model()
    tokenizer = load_tokenizer(path)
    prompt = chat_prompt(tokenizer, args.question)
    print(f"starting: router with {_WORKERS} workers, {_PREFILL} prefill node, {_DECODE} decode node", flush=True)
    with _cluster() as (url, model), TokenClient(url, model) as client:
        print(f"ready at {url}, model {model}\n\n{args.question}  ({len(prompt)} prompt tokens)\n", flush=True)
        answer = show_stream(client, prompt, {"max_new_tokens": args.max_new_tokens}, tokenizer)
        print("\n" + "\n".join(answer_lines(answer, tokenizer.decode(answer.token_ids))), flush=True)
    print("stopped", flush=True)
    return DONE


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[str, str]]:
    """A cluster of real processes; yields its url and model's name. KvferryError when it does not come up or stop."""
    command = (sys.executable, "-m", "ops.cli.main", "serve", "--port", "0", "--set", "log.level=warning")
    sizes = ("--workers", str(_WORKERS), "--prefill", str(_PREFILL), "--decode", str(_DECODE))
    with (
        tempfile.TemporaryFile("w+") as log,
        # A session of its own: a Ctrl-C reaches this process alone, which then stops the cluster.
        subprocess.Popen(
            (*command, *sizes), stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        ) as server,
    ):
        try:
            yield _ready(server, log)
        finally:
            server.send_signal(signal.SIGTERM)
            _await_end(server, log)


def _ready(server: "subprocess.Popen[str]", log: IO[str]) -> tuple[str, str]:
    assert server.stdout is not None
    words = server.stdout.readline().split()
    if len(words) != 3 or words[0] != "ready":
        server.wait()
        raise KvferryError(f"the cluster did not start: {_last_line(log)}")
    return words[1], words[2].removeprefix("model=")


def _await_end(server: "subprocess.Popen[str]", log: IO[str]) -> None:
    try:
        code = server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        raise KvferryError(f"the cluster did not stop: {_last_line(log)}") from None
    if code:
        raise KvferryError(f"the cluster ended with code {code}: {_last_line(log)}")


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = log.read().splitlines()
    return lines[-1] if lines else "it said nothing"
