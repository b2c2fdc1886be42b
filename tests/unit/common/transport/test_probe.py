"""Connection attempts that detect a refusal."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.common.base.errors import ConfigError
from kvferry.common.transport.probe import ProbeResult, probe, probe_async
from tests.support.transport import DEADLINE_S, ipc_endpoint, nothing_left


def probe_in_loop(endpoint: str, timeout_s: float) -> ProbeResult:
    return asyncio.run(probe_async(endpoint, timeout_s))


@pytest.fixture(params=[probe, probe_in_loop])
def any_probe(request: pytest.FixtureRequest) -> Iterator[Callable[[str, float], ProbeResult]]:
    asyncio.run(probe_async("inproc://warm", 1))
    with nothing_left():
        yield request.param


Probe = Callable[[str, float], ProbeResult]


def test_tcp(any_probe: Probe):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert any_probe(endpoint, DEADLINE_S) is ProbeResult.ACCEPTED
    assert any_probe(endpoint, DEADLINE_S) is ProbeResult.REFUSED


def test_ipc(any_probe: Probe, tmp_path: Path):
    endpoint = ipc_endpoint(tmp_path)
    assert any_probe(endpoint, DEADLINE_S) is ProbeResult.REFUSED
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(endpoint.removeprefix("ipc://"))
        server.listen()
        assert any_probe(endpoint, DEADLINE_S) is ProbeResult.ACCEPTED
    assert any_probe(endpoint, DEADLINE_S) is ProbeResult.REFUSED


def test_no_answer_is_a_timeout(any_probe: Probe):
    """A listener with a full backlog does not answer."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        waiting = []
        for _ in range(3):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(address)
            waiting.append(client)
        try:
            assert any_probe(f"tcp://127.0.0.1:{address[1]}", 0.05) is ProbeResult.TIMEOUT
        finally:
            for client in waiting:
                client.close()


def test_a_name_that_does_not_resolve_says_nothing_about_the_process(any_probe: Probe):
    assert any_probe("tcp://no-such-host.invalid:1", DEADLINE_S) is ProbeResult.UNREACHABLE


def test_inproc_cannot_be_probed(any_probe: Probe):
    assert any_probe("inproc://x", DEADLINE_S) is ProbeResult.UNKNOWN


def test_an_invalid_endpoint_is_a_configuration_error(any_probe: Probe):
    with pytest.raises(ConfigError):
        any_probe("127.0.0.1:80", DEADLINE_S)
