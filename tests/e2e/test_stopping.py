"""How a cluster ends: by SIGTERM under load, by an impatient Ctrl-C, before it was ready, with its launcher killed."""

import contextlib
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import Reference, Serve
from tests.support.bodies import body_of
from tests.support.cluster import tokens_of
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.processes import suspended
from tests.support.raw_stream import RawRequest
from tests.support.serve import Served, ServeOptions, wait_until
from tests.support.tiny_llama import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
SHORT, LONG = 8, 2400
LONG_STREAMS = 8


@contextlib.contextmanager
def streams(served: Served, count: int, max_new_tokens: int) -> Iterator[list[RawRequest]]:
    """Streams of which each has its first event behind it."""
    with contextlib.ExitStack() as stack:
        requests = [
            stack.enter_context(
                RawRequest(served, random_prompt(n, 20, VOCAB_SIZE), streamed=True, max_new_tokens=max_new_tokens)
            )
            for n in range(count)
        ]
        for request in requests:
            assert request.status() == 200
            assert tokens_of(request.events(1)) != []
        yield requests


@pytest.mark.rule(37)
def test_sigterm_under_load(serve: Serve) -> None:
    """What can end within the bound does; what cannot says so; nothing new is taken.

    The decode node stands until the signal is heard: first events are the prefill node's, and no answer is whole yet.
    """
    with (
        serve(settings={"router.max_iter_times": LONG, "serve.stop_timeout_s": 3}) as served,
        served.client() as kept_alive,
        contextlib.ExitStack() as standing,
    ):
        standing.enter_context(suspended(served.node("decode-0")))
        with streams(served, LONG_STREAMS, LONG) as long, streams(served, 2, SHORT) as short:
            assert kept_alive.get("/v2/health/live").status_code == 200
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: _is_refused(served), "new requests are refused")
            standing.close()
            for request in short:
                events = request.events()
                assert events[-1]["finish_reason"] == "length"
            for request in long:
                events = request.events()
                assert events[-1]["finish_reason"] == "error"
                assert events[-1]["error_type"] == "Service Unavailable"
        served.ended()
        assert served.log().splitlines()[-1].endswith(" stopped"), "it says so when it is"


def test_second_ctrl_c_does_not_wait(serve: Serve) -> None:
    with (
        serve(settings={"router.max_iter_times": LONG}) as served,
        streams(served, LONG_STREAMS, LONG) as requests,
    ):
        served.process.send_signal(signal.SIGINT)
        wait_until(lambda: "repeat to stop without draining" in served.log(), "the first one is heard")
        served.process.send_signal(signal.SIGINT)
        for request in requests:
            with pytest.raises((EOFError, ConnectionError)):
                request.events()
        served.ended(code=1)
        assert served.log().splitlines()[-1] == "kvferry serve: error: stopped before all children had drained"


def test_ctrl_c_before_it_is_ready(reference: Reference) -> None:
    served = Served(ServeOptions(reference.path))
    try:
        wait_until(lambda: len(served.children()) == 4, "every child is started")
        served.stop()
        assert served.process.stdout is not None
        assert served.process.stdout.read() == b""
    finally:
        served.close()


def test_launcher_is_killed(serve: Serve) -> None:
    """No child outlives it. What it leaves in its directory is for the next one to remove."""
    with serve() as served:
        served.process.kill()
        wait_until(lambda: served.processes() == [], "every child is gone", 90.0)
        assert len(list((served.base / "run").iterdir())) == 1


def _is_refused(served: Served) -> bool:
    try:
        answer = httpx.post(served.infer_url, content=body_of([1], max_new_tokens=1), trust_env=False, timeout=10.0)
    except httpx.TransportError:
        return True
    return answer.status_code == 503
