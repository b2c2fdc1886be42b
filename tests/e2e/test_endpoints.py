"""Health, model and metrics endpoints of a running cluster; metrics are those of both workers, whichever answers."""

import httpx
import pytest

from tests.support.bodies import body_of
from tests.support.infer_cases import MAX_INPUT_LENGTH, MAX_ITER_TIMES, MAX_MODEL_LEN, VOCAB_SIZE
from tests.support.serve import Served, wait_until

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/health", "/v2/models/m/ready", "/v2"])
def test_it_is_well(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    assert http.head(path).status_code == 200
    assert answer.headers["content-type"] == "application/json"


def test_model_and_its_limits(http: httpx.Client) -> None:
    assert http.get("/v2/models/m").json()["name"] == "m"
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["m"]
    config = http.get("/v2/models/m/config").json()
    assert config["vocab_size"] == VOCAB_SIZE
    assert config["max_model_len"] == MAX_MODEL_LEN
    assert config["max_input_length"] == config["max_prompt_tokens"] == MAX_INPUT_LENGTH
    assert config["max_iter_times"] == MAX_ITER_TIMES
    for path in ("/v2/models/unknown", "/v2/models/unknown/config", "/v2/models/unknown/ready"):
        assert http.get(path).status_code == 404


def test_metrics_are_those_of_both_workers(served: Served) -> None:
    before = served.metrics()

    def grown(name: str) -> float:
        return served.metrics()[name] - before[name]

    workers = served.workers()
    assert len(workers) == 2
    for worker in workers:
        with served.only_worker(worker):
            answer = httpx.post(served.infer_url, content=body_of([1, 2, 3], max_new_tokens=2), trust_env=False)
            assert answer.status_code == 200
            assert httpx.post(served.infer_url, content=b"{", trust_env=False).status_code == 422
    # A request is counted after its answer's last byte.
    wait_until(lambda: grown("request_failed_total") == 2, "the refused requests are counted")
    wait_until(lambda: grown("request_success_total") == 2, "the others are counted")
    for worker in workers:
        with served.only_worker(worker):
            after = served.metrics()
        assert after["request_received_total"] - before["request_received_total"] == 4
        assert after["generation_tokens_total"] - before["generation_tokens_total"] == 4
        assert after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"] == 2
        assert after["num_requests_running"] == after["num_requests_waiting"] == 0
