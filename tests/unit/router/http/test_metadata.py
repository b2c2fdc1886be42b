"""Resources that answer GET: health, metadata, configuration, metrics; and the lifespan."""

import asyncio
import os
import subprocess
import sys

import msgspec
import pytest
from falcon import testing
from prometheus_client.parser import text_string_to_metric_families

from kvferry.router.api import ServiceCounts
from kvferry.router.http.metrics import MULTIPROCESS_VARIABLE
from tests.support.fake_service import MODEL, Script
from tests.support.http_app import HttpApp
from tests.support.infer_cases import base, encode

PATH = "/v2/models/m/infer"


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/health", "/v2/models/m/ready"])
def test_healthy(path):
    result = testing.TestClient(HttpApp().app).simulate_get(path)
    assert result.status_code == 200
    assert isinstance(result.json, dict)


@pytest.mark.parametrize("path", ["/v2/health/ready", "/health", "/v2/models/m/ready"])
def test_not_ready_has_a_reason(path):
    http = HttpApp()
    http.service.not_ready = "no live decode node for model m"
    result = testing.TestClient(http.app).simulate_get(path)
    assert result.status_code == 503
    assert result.json == {"error": http.service.not_ready, "error_type": "Service Unavailable"}
    assert result.headers["retry-after"] == "1"
    assert testing.TestClient(http.app).simulate_get("/v2/health/live").status_code == 200


@pytest.mark.parametrize("tail", ["", "/ready", "/config"])
def test_an_unknown_model_is_not_found(tail):
    result = testing.TestClient(HttpApp().app).simulate_get(f"/v2/models/nope{tail}")
    assert (result.status_code, result.json["error_type"]) == (404, "NotFoundError")


def test_server_metadata():
    result = testing.TestClient(HttpApp().app).simulate_get("/v2")
    assert result.json.keys() == {"name", "version", "extensions"}
    assert (result.json["name"], result.json["version"]) == ("kvferry", "1.2.3")


def test_the_list_of_models_has_openais_form():
    http = HttpApp(started_at=7)
    http.service.models_known["a"] = msgspec.structs.replace(MODEL, name="a")
    result = testing.TestClient(http.app).simulate_get("/v1/models")
    assert result.status_code == 200
    data = [{"id": name, "object": "model", "created": 7, "owned_by": "kvferry"} for name in ("a", "m")]
    assert result.json == {"object": "list", "data": data}


def test_the_list_of_models_is_empty_before_a_node_has_registered():
    http = HttpApp()
    http.service.models_known.clear()
    result = testing.TestClient(http.app).simulate_get("/v1/models")
    assert (result.status_code, result.json) == (200, {"object": "list", "data": []})
    assert testing.TestClient(http.app).simulate_get("/v1/models/m").status_code == 404


def test_model_metadata():
    result = testing.TestClient(HttpApp().app).simulate_get("/v2/models/m")
    assert result.json == {
        "name": "m",
        "platform": "kvferry",
        "inputs": [{"name": "input0", "datatype": "UINT32", "shape": [1, -1]}],
        "outputs": [{"name": "output0", "datatype": "UINT32", "shape": [1, -1]}],
    }


def test_model_config_has_the_limits():
    config = testing.TestClient(HttpApp().app).simulate_get("/v2/models/m/config").json
    assert config["name"] == "m"
    assert (config["max_model_len"], config["max_input_length"], config["max_prompt_tokens"]) == (2560, 2048, 2048)
    assert (config["max_iter_times"], config["max_body_bytes"], config["vocab_size"]) == (512, 40_000_000, 32000)


@pytest.mark.parametrize("path", ["/v2", "/v2/health/live", "/v2/models/m/config", "/v2/models/nope"])
def test_head_is_get_without_the_body(path):
    client = testing.TestClient(HttpApp().app)
    head, get = client.simulate_head(path), client.simulate_get(path)
    assert head.content == b""
    assert (head.status_code, head.headers["content-length"]) == (get.status_code, str(len(get.content)))


def samples(http: HttpApp) -> dict[str, float]:
    """Values of the samples labelled with model m; for histograms the count."""
    result = testing.TestClient(http.app).simulate_get("/metrics")
    assert result.status_code == 200
    assert result.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(result.text):
        for sample in family.samples:
            if sample.labels.get("model_name") == "m":
                found[sample.name] = sample.value
    return found


NAMES = {
    "request_received_total", "request_success_total", "request_failed_total", "num_requests_running",
    "num_requests_waiting", "time_to_first_token_seconds_count", "time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count", "npu_cache_usage_perc", "npu_prefix_cache_hit_rate", "num_preemptions_total",
    "num_swaps_total", "prompt_tokens_total", "generation_tokens_total",
}  # fmt: skip


def test_all_metrics_exist_before_the_first_request():
    found = samples(HttpApp())
    assert found.keys() >= NAMES
    assert all(found[name] == 0 for name in NAMES)


def test_metrics_count_the_requests():
    http = HttpApp()
    client = testing.TestClient(http.app)
    body = encode(base(parameters={"max_new_tokens": 7}))
    assert client.simulate_post(PATH, body=body).status_code == 200
    http.service.script = Script(end_after=2, outcome="timeout")
    assert client.simulate_post(PATH, body=body).status_code == 408
    assert client.simulate_post(PATH, body=b"{").status_code == 422
    assert client.simulate_post("/v2/models/nope/infer", body=b"{").status_code == 404
    found = samples(http)
    expected = {
        "request_received_total": 3, "request_success_total": 1, "request_failed_total": 2, "num_requests_running": 0,
        "num_requests_waiting": 0, "time_to_first_token_seconds_count": 2, "time_per_output_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2, "prompt_tokens_total": 6, "generation_tokens_total": 9,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_metrics_show_the_reports_of_nodes():
    http = HttpApp()
    http.service.reported = ServiceCounts(
        cache_usage={"m": 0.25}, prefix_hit_rate={"m": 0.5}, preemptions={"m": 4, "unknown": 1}, swaps={"m": 6}
    )
    found = samples(http)
    assert found["npu_cache_usage_perc"] == 0.25
    assert found["npu_prefix_cache_hit_rate"] == 0.5
    assert found["num_preemptions_total"] == 4
    assert found["num_swaps_total"] == 6


async def _lifespan(http: HttpApp) -> list[str]:
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive():
        return messages.pop(0)

    async def send(message) -> None:
        sent.append(str(message["type"]))

    await http.app({"type": "lifespan"}, receive, send)
    return sent


def test_lifespan_calls_startup_and_shutdown():
    http = HttpApp()
    assert asyncio.run(_lifespan(http)) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert http.events == ["startup", "shutdown"]


def test_a_failed_startup_is_reported_to_the_server():
    http = HttpApp(startup_error=OSError("address in use"))
    assert asyncio.run(_lifespan(http)) == ["lifespan.startup.failed"]
    assert http.events == ["startup"]
    assert http.log.records[0].exc_info is not None


def test_a_websocket_is_closed():
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message) -> None:
        sent.append(message["type"])

    asyncio.run(HttpApp().app({"type": "websocket"}, receive, send))
    assert sent == ["websocket.close"]


_WORKER = """
import os, sys
from prometheus_client import CollectorRegistry
from kvferry.router.api import EndEvent, Usage
from kvferry.router.http.metrics import metrics_from_environment
metrics = metrics_from_environment(os.environ, CollectorRegistry())
for _ in range(int(sys.argv[1])):
    metrics.received("m")
    metrics.submitted("m")
    metrics.first_token("m", 0.1)
    metrics.generated("m", EndEvent("length", Usage(3, 4), attempts=3), 1.0, 0.5)
assert metrics.reads_files
sys.stdout.buffer.write(metrics.render())
"""


def test_any_worker_shows_the_metrics_of_all(tmp_path):
    """Two processes as under gunicorn: the answer of the second includes the requests of the first."""
    environment = {**os.environ, MULTIPROCESS_VARIABLE: str(tmp_path)}
    for count in (2, 3):
        command = [sys.executable, "-c", _WORKER, str(count)]
        text = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60).stdout.decode()
    found = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    assert found["request_received_total"] == 5
    assert found["num_requests_running"] == 5
    assert found["generation_tokens_total"] == 20
    assert found["request_retries_total"] == 10
    assert found["time_to_first_token_seconds_count"] == 5
