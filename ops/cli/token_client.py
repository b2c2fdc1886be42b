"""A client of the token API, unary and streamed, that measures TTFT and TPOT. Used by `kvferry infer` and the demo."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import httpx
import orjson

from kvferry.common.base.errors import ConfigError, KvferryError
from kvferry.ops.cli.pluralize import pluralize
from kvferry.ops.cli.sampling import Parameters
from kvferry.ops.cli.target import parse_url, refusal, unreachable

_DATA = "data:"
_LONGEST_S = 3600.0
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """The answer to a request. Times are seconds since the request was sent; None if the answer has none."""

    token_ids: list[int]
    total_s: float
    ttft_s: float | None = None
    """Time to the first token."""
    tpot_s: float | None = None
    """Mean time per output token after the first."""
    finish_reason: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)
    prefill_node: str = ""
    decode_node: str = ""


class TokenClient:
    """Client of one model behind one router. Must be used as a context manager. Raises ConfigError for a wrong URL."""

    def __init__(self, url: str, model: str) -> None:
        target = parse_url(url)
        self._url = url
        try:
            self._model_path = httpx.URL(f"{url.rstrip('/')}/v2/models/{quote(model, safe='')}")
            self._path = httpx.URL(f"{self._model_path}/infer")
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url: {url}: {error}") from None
        # Proxies of the environment do not apply to this machine.
        trust_env = target.host not in ("localhost", "127.0.0.1", "::1")
        self._http = httpx.Client(timeout=httpx.Timeout(_LONGEST_S, connect=_CONNECT_S), trust_env=trust_env)

    def __enter__(self) -> "TokenClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def require_model(self) -> None:
        """Raise RequestInvalidError, with the server's text, if it does not know the model; KvferryError if it cannot
        be reached. Does not check that the model can be served now."""
        try:
            response = self._http.get(self._model_path, timeout=_CONNECT_S)
        except httpx.HTTPError as error:
            raise _unreachable(self._url, error) from error
        if response.status_code == httpx.codes.NOT_FOUND:
            _require_ok(response)

    def infer(self, prompt: Sequence[int], parameters: Parameters) -> TokenAnswer:
        """Unary request. Raises KvferryError if the router refuses or cannot be reached, RequestInvalidError if the
        request is invalid."""
        sent = time.monotonic()
        try:
            response = self._http.post(self._path, content=_body(prompt, parameters))
        except httpx.HTTPError as error:
            raise _unreachable(self._url, error) from error
        _require_ok(response)
        return TokenAnswer(_unary_ids(response), time.monotonic() - sent)

    def stream(
        self, prompt: Sequence[int], parameters: Parameters, on_tokens: Callable[[list[int]], None]
    ) -> TokenAnswer:
        """Streamed request: the answer with times; `on_tokens` gets the tokens as they arrive. Raises as `infer`, and
        KvferryError if the stream breaks."""
        sent = time.monotonic()
        try:
            with self._http.stream(
                "POST", self._path, content=_body(prompt, parameters), headers={"Accept": "text/event-stream"}
            ) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                _require_ok(response)
                return _read_stream(_events(response), sent, on_tokens)
        except httpx.HTTPError as error:
            raise _unreachable(self._url, error) from error


def _read_stream(
    events: Iterator[dict[str, object]], sent: float, on_tokens: Callable[[list[int]], None]
) -> TokenAnswer:
    token_ids: list[int] = []
    first = last = None
    for event in events:
        if "error" in event:
            raise KvferryError(
                f"after {pluralize(len(token_ids), 'token')}: {event.get('error_type')}: {event['error']}"
            )
        new = _integers(event.get("token_ids", []))
        if new:
            if event.get("index") != len(token_ids):
                raise KvferryError(f"the stream jumped from index {len(token_ids)} to {event.get('index')}")
            last = time.monotonic() - sent
            first = last if first is None else first
            token_ids += new
            on_tokens(new)
        if "finish_reason" in event:
            return _answer(event, token_ids, time.monotonic() - sent, first, last)
    raise KvferryError(f"the stream ended after {pluralize(len(token_ids), 'token')} without a finish_reason")


def _answer(
    event: Mapping[str, object], token_ids: list[int], total_s: float, first: float | None, last: float | None
) -> TokenAnswer:
    later = len(token_ids) - 1
    usage, nodes = event.get("usage"), event.get("nodes")
    named = nodes if isinstance(nodes, dict) else {}
    return TokenAnswer(
        token_ids,
        total_s,
        ttft_s=first,
        tpot_s=None if first is None or last is None or later < 1 else (last - first) / later,
        finish_reason=str(event["finish_reason"]),
        usage=usage if isinstance(usage, dict) else {},
        prefill_node=str(named.get("prefill", "")),
        decode_node=str(named.get("decode", "")),
    )


def _body(prompt: Sequence[int], parameters: Parameters) -> bytes:
    tensor = {"name": "input0", "shape": [1, len(prompt)], "datatype": "UINT32", "data": list(prompt)}
    return orjson.dumps({"inputs": [tensor], "outputs": [{"name": "output0"}], "parameters": dict(parameters)})


def _events(response: httpx.Response) -> Iterator[dict[str, object]]:
    for line in response.iter_lines():
        if line.startswith(_DATA):
            try:
                event = orjson.loads(line.removeprefix(_DATA))
            except orjson.JSONDecodeError:
                event = None
            if not isinstance(event, dict):
                raise KvferryError(f"expected an event of the token API, got {line[:80]}")
            yield event


def _unary_ids(response: httpx.Response) -> list[int]:
    try:
        return _integers(orjson.loads(response.content)["outputs"][0]["data"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise KvferryError(f"expected an answer of the token API, got {response.text[:80]}") from None


def _integers(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise KvferryError("the answer contains something other than token ids")
    return [int(item) for item in value]


def _require_ok(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.OK:
        return
    try:
        body = orjson.loads(response.content)
        text = f"{body['error_type']}: {body['error']}"
    except (orjson.JSONDecodeError, LookupError, TypeError):
        text = response.text[:200]
    raise refusal(response.status_code, f"{response.status_code} {text}")


def _unreachable(url: str, error: httpx.HTTPError) -> KvferryError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__  # httpcore's pool keeps only the context
    return unreachable(url, cause) if cause else KvferryError(f"{url}: {error or type(error).__name__}")
