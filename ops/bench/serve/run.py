"""Measures a running server: detects its API, sends a first request and a warm-up, then the load.

The client is one process with one event loop, without an HTTP library and without a task per token.
`python -m kvferry.ops.bench.serve.ceiling` prints its highest rate; `client` in the report is its share of a core.
"""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Literal

import orjson

from kvferry.common.base.errors import ConfigError, KvferryError
from kvferry.ops.bench.serve.connection import CutOffError, HttpConnection
from kvferry.ops.bench.serve.dialect import EXTRAS, Dialect, InferDialect, OpenAiDialect
from kvferry.ops.bench.serve.load import OnEnd, RequestLoad, prompts, run_load
from kvferry.ops.bench.serve.report import Frame, ServeReport, make_report
from kvferry.ops.bench.serve.request import Requester, error_of_body
from kvferry.ops.bench.serve.response import MalformedAnswerError
from kvferry.ops.cli.pluralize import pluralize
from kvferry.ops.cli.target import Target, parse_url, refusal, unreachable

Api = Literal["auto", "infer", "openai"]

_ASK_S = 10.0
_OK, _BAD_REQUEST, _NOT_FOUND, _UNPROCESSABLE, _UNAVAILABLE = 200, 400, 404, 422, 503
_HTTP = "http_"
"""Prefix of an outcome's error that is a status."""
_LONGEST_SERVER_TIMEOUT_S = 3600
_FEW_IDS = 1000
"""Vocabulary size of the prompts if the server does not report its own."""


@dataclass(frozen=True, slots=True)
class ServeBench:
    """The server to measure, and the load."""

    url: str
    model: str
    api: Api
    load: RequestLoad
    """Its vocab_size may be 0: the size that the server reports."""
    warmup: int
    timeout_s: float
    ignore_eos: bool = False


async def measure_server(bench: ServeBench, on_end: OnEnd) -> ServeReport:
    """Run the benchmark; `on_end` gets every outcome of the load.

    Raises KvferryError if the server is unreachable or fails, ConfigError if it has no such model or API,
    RequestInvalidError if it rejects the request, such as a prompt that is too long.
    """
    target = parse_url(bench.url)
    vocab_size = await _vocab_size(target, bench) if bench.api != "openai" else None
    if vocab_size is None and bench.api == "infer":
        raise ConfigError(f"{bench.url} has no /v2/models/{bench.model}; check --model")
    api = "openai" if vocab_size is None else "infer"
    if bench.ignore_eos and api == "infer":
        raise ConfigError("--ignore-eos: the token API does not support it, only OpenAI-style servers do")
    load = replace(bench.load, vocab_size=bench.load.vocab_size or vocab_size or _FEW_IDS)
    dialect = await _working_dialect(target, bench, api, load)
    requester = Requester(target, dialect, bench.timeout_s)
    try:
        await _warm_up(requester, dialect, load, bench.warmup)
        bodies = [dialect.body(prompt, load.output_len) for prompt in prompts(load, load.requests, "load")]
        cpu = time.process_time()
        outcomes = await run_load(requester, load, bodies, on_end)
        cpu = time.process_time() - cpu
    finally:
        requester.close()
    if all(outcome.error for outcome in outcomes):
        all_of_them = f"all {pluralize(len(outcomes), 'request')}"
        raise KvferryError(f"{all_of_them} failed, the first: {outcomes[0].detail}")
    # The request that detected the API belongs to the warm-up.
    frame = Frame(bench.url, bench.model, api, bench.warmup + 1, cpu)
    return make_report(frame, load, outcomes)


async def _warm_up(requester: Requester, dialect: Dialect, load: RequestLoad, count: int) -> None:
    """Send requests that are not counted, so that connections, pools and caches exist."""
    bodies = [dialect.body(prompt, load.output_len) for prompt in prompts(load, count, "warm-up")]
    await run_load(
        requester, replace(load, rate=None, concurrency=load.concurrency or max(1, count)), bodies, lambda _: None
    )


async def _working_dialect(target: Target, bench: ServeBench, api: str, load: RequestLoad) -> Dialect:
    """The API with as many extra fields as the server accepts, detected by sending requests until one succeeds."""
    server_timeout = min(_LONGEST_SERVER_TIMEOUT_S, max(1, round(bench.timeout_s)))
    candidates: list[Dialect] = [InferDialect(bench.model, server_timeout)]
    if api == "openai":
        candidates = [OpenAiDialect(bench.model, extras, ignore_eos=bench.ignore_eos) for extras in EXTRAS]
    (prompt,) = prompts(load, 1, "first")
    for dialect in candidates:
        requester = Requester(target, dialect, bench.timeout_s)
        outcome = await requester.send(dialect.body(prompt, load.output_len), asyncio.get_running_loop().time())
        requester.close()
        if not outcome.error:
            return dialect
        if outcome.error not in (f"{_HTTP}{_BAD_REQUEST}", f"{_HTTP}{_UNPROCESSABLE}"):
            break
    if bench.api == "auto" and outcome.error == f"{_HTTP}{_NOT_FOUND}":
        raise ConfigError(
            f"{bench.url} has neither /v2/models/{bench.model} nor {dialect.path} for {bench.model}; check --model"
        )
    text = f"{bench.url.rstrip('/')}{dialect.path}: {outcome.detail}"
    raise (
        refusal(int(outcome.error.removeprefix(_HTTP)), text) if outcome.error.startswith(_HTTP) else KvferryError(text)
    )


async def _vocab_size(target: Target, bench: ServeBench) -> int | None:
    """The size from `/v2/models/{model}/config`; None if the server has no such model in this API."""
    path = InferDialect(bench.model, 1).path.removesuffix("/infer") + "/config"
    status, body = await _get(target, path, bench.url)
    if status == _UNAVAILABLE:
        raise KvferryError(f"{bench.url.rstrip('/')}{path}: {status} {error_of_body(body)}")
    if status != _OK:
        return None
    try:
        size = orjson.loads(body)["vocab_size"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        size = None
    return size if isinstance(size, int) and size > 0 else _FEW_IDS


async def _get(target: Target, path: str, url: str) -> tuple[int, bytes]:
    pieces: list[bytes] = []
    connection: HttpConnection | None = None
    try:
        async with asyncio.timeout(_ASK_S):
            connection = await HttpConnection.open(target)
            status = await connection.ask("GET", path, b"", "application/json", lambda _, data: pieces.append(data))
    except TimeoutError:
        raise KvferryError(f"{url}: no answer within {_ASK_S:g} s") from None
    except CutOffError:
        raise KvferryError(f"{url}: the connection closed before the answer was complete") from None
    except MalformedAnswerError as error:
        raise KvferryError(f"{url}: {error}") from None
    except OSError as error:
        raise unreachable(url, error) from None
    finally:
        if connection is not None:
            connection.close()
    return status, b"".join(pieces)
