"""`kvferry infer`: sends one request to a running router, with a prompt of token ids or text."""

import argparse
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.common.base.errors import ConfigError, KvferryError, RequestInvalidError
from kvferry.ops import model_store
from kvferry.ops.cli.errors import DONE
from kvferry.ops.cli.sampling import Parameters, add_sampling_options, sampling_parameters

if TYPE_CHECKING:
    from kvferry.common.tokenizer import Tokenizer
    from kvferry.ops.cli.token_client import TokenAnswer, TokenClient

_MOST_ID = 2**32 - 1
"""Ids are UINT32; the router rejects those outside the model's vocabulary."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("infer", help="send one request", description="Sends one request to a running router.")
    parser.add_argument("--url", default="http://127.0.0.1:1025", help="URL of the router (http://127.0.0.1:1025)")
    parser.add_argument("--model", required=True, metavar="NAME", help="name of the model")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--tokens", metavar="1,2,3", help="the prompt as token ids")
    prompt.add_argument("--text", help="the prompt as text; requires the model's tokenizer")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help=f"HuggingFace directory or GGUF file of the model; default for {model_store.MODEL_NAME}: its own",
    )
    parser.add_argument("--chat", action="store_true", help="wrap --text in the model's chat template")
    parser.add_argument(
        "--stream", action="store_true", help="print tokens as they arrive, then TTFT, TPOT and the nodes"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, times in seconds. Fields are null if unknown: text without a tokenizer; "
        "finish_reason, usage, ttft_s, tpot_s and nodes without --stream; tpot_s and the decode node for an answer of "
        "one token",
    )
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from kvferry.ops.cli.token_client import TokenClient

    if args.chat and args.text is None:
        raise ConfigError("--chat requires --text; the ids of --tokens are sent unchanged")
    parameters = sampling_parameters(args)
    tokenizer = _tokenizer(args)
    prompt = _prompt(args, tokenizer)
    with TokenClient(args.url, args.model) as client:
        if not args.stream:
            answer = client.infer(prompt, parameters)
        elif args.json:
            answer = client.stream(prompt, parameters, lambda token_ids: None)
        else:
            answer = show_stream(client, prompt, parameters, tokenizer)
    text = tokenizer.decode(answer.token_ids) if tokenizer is not None else None
    if args.json:
        print(json.dumps(answer_fields(answer, text), ensure_ascii=False))
    else:
        shown = None if args.stream else text
        print("\n".join(answer_lines(answer, shown, args.max_new_tokens)))
    return DONE


def show_stream(
    client: "TokenClient", prompt: list[int], parameters: Parameters, tokenizer: "Tokenizer | None"
) -> "TokenAnswer":
    """Stream an answer to stdout, as text with a tokenizer, else as ids. Ends a started line also after a failure."""
    pieces = tokenizer.stream() if tokenizer is not None else None
    is_started = False

    def show(token_ids: list[int]) -> None:
        nonlocal is_started
        is_started = True
        shown = pieces.push(token_ids) if pieces is not None else "".join(f"{token_id} " for token_id in token_ids)
        print(shown, end="", flush=True)

    try:
        return client.stream(prompt, parameters, show)
    finally:
        if is_started:
            print(pieces.flush() if pieces is not None else "", flush=True)


def answer_lines(answer: "TokenAnswer", text: str | None, max_new_tokens: int) -> list[str]:
    """The answer as lines of text. `text` is None if it has been printed already."""
    usage = " ".join(f"{name}={count}" for name, count in answer.usage.items())
    lines = [] if text is None else [f"text   {text!r}"]
    lines.append(f"ids    {answer.token_ids}")
    end = f"{answer.finish_reason} {usage}".strip()
    lines.append(f"tokens {len(answer.token_ids)} of at most {max_new_tokens} in {answer.total_s:.3f} s {end}".rstrip())
    if answer.finish_reason == "length" and len(answer.token_ids) < max_new_tokens:
        lines.append(f"note   {max_new_tokens} were requested; this server's limit is lower")
    if answer.ttft_s is not None:
        lines.append(f"TTFT   {answer.ttft_s * 1000:.1f} ms")
    if answer.tpot_s is not None:
        lines.append(f"TPOT   {answer.tpot_s * 1000:.1f} ms")
    named = [f"{role}={name}" for role, name in _nodes(answer).items() if name]
    if named:
        lines.append(f"nodes  {' '.join(named)}")
    return lines


def answer_fields(answer: "TokenAnswer", text: str | None) -> dict[str, object]:
    """The answer as the object that --json prints. Times in seconds."""
    nodes = _nodes(answer)
    return {
        "token_ids": answer.token_ids,
        "text": text,
        "finish_reason": answer.finish_reason or None,
        "usage": dict(answer.usage) or None,
        "total_s": answer.total_s,
        "ttft_s": answer.ttft_s,
        "tpot_s": answer.tpot_s,
        "nodes": {role: name or None for role, name in nodes.items()} if any(nodes.values()) else None,
    }


def _nodes(answer: "TokenAnswer") -> dict[str, str]:
    return {"prefill": answer.prefill_node, "decode": answer.decode_node}


def _tokenizer(args: argparse.Namespace) -> "Tokenizer | None":
    path: Path | None = args.tokenizer
    if path is None and args.model == model_store.MODEL_NAME and model_store.has_model():
        path = model_store.model_path()
    if path is None:
        if args.text is not None:
            raise _tokenizer_needed(args)
        return None
    if not path.exists():
        raise ConfigError(f"--tokenizer: {path} does not exist")
    from kvferry.common.tokenizer import load_tokenizer

    return load_tokenizer(path)


def _tokenizer_needed(args: argparse.Namespace) -> KvferryError:
    """The error that says how to get a tokenizer, or the server's own error if it does not serve the model."""
    from kvferry.ops.cli.token_client import TokenClient

    with contextlib.suppress(KvferryError), TokenClient(args.url, args.model) as client:
        try:
            client.require_model()
        except RequestInvalidError as error:
            return error
    cure = "name its HuggingFace directory or GGUF file with --tokenizer PATH"
    if args.model == model_store.MODEL_NAME:
        cure = "fetch the model with python -m kvferry.ops.model_store, or use --tokenizer PATH"
    return ConfigError(f"--text requires the tokenizer of model {args.model}: {cure}")


def _prompt(args: argparse.Namespace, tokenizer: "Tokenizer | None") -> list[int]:
    if args.tokens is not None:
        return _token_ids(args.tokens)
    assert tokenizer is not None
    if not args.text:
        raise ConfigError("--text is empty; a prompt needs at least one token")
    if args.chat:
        from kvferry.ops.cli.chat import chat_prompt

        return chat_prompt(tokenizer, args.text)
    return tokenizer.encode(args.text)


def _token_ids(text: str) -> list[int]:
    try:
        ids = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--tokens: expected integers separated by commas, got {text!r}") from None
    for token_id in ids:
        if not 0 <= token_id <= _MOST_ID:
            raise ConfigError(f"--tokens: expected ids from 0 to {_MOST_ID}, got {token_id}")
    return ids
