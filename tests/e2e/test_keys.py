"""A cluster of real processes with keys on all of its sockets: it serves, outlives kills, and lets no incompatible
in."""

from collections.abc import Iterator

import httpx
import pytest

from kvferry.common.config.endpoints import with_key
from kvferry.ops.cli.main import main
from tests.e2e.conftest import Reference, Serve
from tests.support.bodies import body_of
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.keys import KeyRing
from tests.support.node_watch import NodeWatch
from tests.support.processes import has_ended
from tests.support.serve import Served, wait_until
from tests.support.tiny_llama import random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.rule(38)]
PROMPT = random_prompt(31, 40, VOCAB_SIZE)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    return KeyRing(tmp_path_factory.mktemp("keyed") / "keys")


@pytest.fixture(scope="module")
def cluster(serve: Serve, keys: KeyRing) -> Iterator[Served]:
    with serve(settings={**keys.settings(), "serve.restart_min_s": 0.1}) as cluster:
        yield cluster


def answers(cluster: Served, reference: Reference) -> None:
    response = httpx.post(cluster.infer_url, content=body_of(PROMPT, max_new_tokens=12), trust_env=False, timeout=60.0)
    assert response.status_code == 200, response.text
    assert response.json()["outputs"][0]["data"] == reference.tokens(PROMPT, 12)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0", "proxy", "worker"])
def test_it_serves_again_when_something_was_killed(cluster: Served, reference: Reference, victim: str) -> None:
    answers(cluster, reference)
    process = cluster.workers()[0] if victim == "worker" else cluster.children()[victim]
    process.kill()
    wait_until(lambda: has_ended(process), f"{victim} is gone")
    wait_until(lambda: len(cluster.children()) == 4 and len(cluster.workers()) == 2, "all processes are there", 120.0)
    wait_until(cluster.is_ready, "it is ready again", 120.0)
    answers(cluster, reference)


def test_who_has_a_key_hears_the_nodes_and_a_peer_without_one_hears_nothing(cluster: Served, keys: KeyRing) -> None:
    public = keys.add("incompatible", "router")
    incompatible = keys.security("router", "incompatible")
    keys.forbid("incompatible")
    members = with_key(cluster.members_endpoint(), keys.public["router"].hex)
    with NodeWatch(members, incompatible) as outside, NodeWatch(members, keys.security("router")) as inside:
        inside.wait_idle("prefill-0", "decode-0")
        wait_until(lambda: public.hex in cluster.log(), "the refusal is logged")
        assert outside.views() == {}
    reported = [line for line in cluster.log().splitlines() if public.hex in line]
    assert len(reported) == 1


def test_a_router_may_come_with_a_key_that_was_listed_while_all_ran(cluster: Served, keys: KeyRing) -> None:
    keys.add("second", "router")
    members = with_key(cluster.members_endpoint(), keys.public["router"].hex)
    with NodeWatch(members, keys.security("router", "second")) as watch:
        watch.wait_idle("prefill-0", "decode-0")


def test_a_key_that_does_not_fit_stops_the_start(
    keys: KeyRing, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--model", str(reference.path), "--port", "0"]
    for key, value in {**keys.settings(), "security.router_key_file": keys.secret_file("node")}.items():
        words += ["--set", f"{key}={value}"]
    assert main(words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvferry serve: error")]
    assert "security.router_key_file" in line
    assert "has a node key; expected a router key" in line
