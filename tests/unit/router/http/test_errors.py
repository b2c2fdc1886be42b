"""Every error answer has the status, type and shape of the contract, whatever raised it."""

import json

import pytest
from falcon import testing

from kvferry.common.base.errors import (
    GenerationError,
    InvariantError,
    KvferryError,
    ModelNotFoundError,
    OverloadedError,
    ProtocolError,
    RequestInvalidError,
    UnavailableError,
)
from kvferry.router.api import EndEvent, Usage
from kvferry.router.http.errors import (
    BodyTooLargeError,
    DeadlineExceededError,
    GenerationCancelledError,
    error_of_end,
    problem_of,
)
from tests.support.fake_service import Script
from tests.support.http_app import HttpApp
from tests.support.infer_cases import base, encode

PATH = "/v2/models/m/infer"
BODY = encode(base())


def error(result: testing.Result) -> tuple[int, str, str]:
    answer = json.loads(result.content)
    assert answer.keys() == {"error", "error_type"}
    assert result.headers["content-type"] == "application/json"
    assert "Traceback" not in answer["error"]
    return result.status_code, answer["error_type"], answer["error"]


@pytest.mark.parametrize(
    ("raised", "status", "error_type"),
    [
        (RequestInvalidError("x"), 422, "Input Validation Error"),
        (ModelNotFoundError("x"), 404, "NotFoundError"),
        (BodyTooLargeError("x"), 413, "Request Too Large"),
        (DeadlineExceededError("x"), 408, "Request Timeout"),
        (GenerationError("x"), 424, "Generation Error"),
        (OverloadedError("x"), 429, "Too Many Requests"),
        (UnavailableError("x"), 503, "Service Unavailable"),
        (GenerationCancelledError("x"), 500, "Incomplete Generation"),
        (ProtocolError("x"), 500, "Incomplete Generation"),
        (KvferryError("x"), 500, "Incomplete Generation"),
    ],
)
def test_an_error_of_this_project_has_its_status_and_its_own_text(raised, status, error_type):
    problem = problem_of(raised)
    assert (problem.status, problem.error_type, problem.message) == (status, error_type, "x")


@pytest.mark.parametrize("raised", [InvariantError("secret"), ValueError("secret"), RuntimeError("secret")])
def test_an_internal_error_does_not_show_its_text(raised):
    problem = problem_of(raised)
    assert (problem.status, problem.error_type) == (500, "Incomplete Generation")
    assert "secret" not in problem.message


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (EndEvent("timeout", Usage(1, 0)), 408),
        (EndEvent("timeout", Usage(1, 0), error=OverloadedError("queued for too long")), 408),
        (EndEvent("error", Usage(1, 0), error=GenerationError("nan")), 424),
        (EndEvent("error", Usage(1, 0), error=UnavailableError("no node left")), 503),
        (EndEvent("error", Usage(1, 0)), 500),
        (EndEvent("cancelled", Usage(1, 0)), 500),
    ],
)
def test_every_end_but_stop_and_length_is_an_error(end, status):
    raised = error_of_end(end)
    assert raised is not None
    assert problem_of(raised).status == status


@pytest.mark.parametrize("outcome", ["stop", "length"])
def test_stop_and_length_are_no_errors(outcome):
    assert error_of_end(EndEvent(outcome, Usage(1, 1))) is None


@pytest.mark.parametrize(
    "path", ["/", "/nope", "/v2/models", "/v2/models/m/infer/", "/v2/models/m/nope", "/v2/models/a/b/infer", "/v3"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS", "BREW"])
def test_unknown_path(path, method):
    result = testing.TestClient(HttpApp().app).simulate_request(method, path, body="{")
    assert error(result)[:2] == (404, "NotFoundError")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize("tail", ["", "/", "/1", "/1/infer", "/1/ready", "/1/2/3"])
def test_versions_are_refused_explicitly(method, tail):
    result = testing.TestClient(HttpApp().app).simulate_request(method, f"/v2/models/m/versions{tail}", body="{")
    status, error_type, text = error(result)
    assert (status, error_type) == (404, "NotFoundError")
    assert "versions are not supported" in text


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "TRACE", "BREW", "WEBSOCKET"])
@pytest.mark.parametrize("path", [PATH, "/v2/models/m/infer_stream", "/v2/models/unknown/infer"])
def test_wrong_method_on_a_post_path(method, path):
    result = testing.TestClient(HttpApp().app).simulate_request(method, path)
    assert result.status_code == 405
    assert set(result.headers["allow"].split(", ")) == {"POST", "OPTIONS"}
    if method != "HEAD":
        assert error(result)[:2] == (405, "MethodNotAllowed")


@pytest.mark.parametrize("method", ["POST", "PUT", "BREW"])
@pytest.mark.parametrize("path", ["/v2", "/v2/health/live", "/metrics", "/v2/models/m/config", "/v2/models/nope"])
def test_wrong_method_on_a_get_path(method, path):
    result = testing.TestClient(HttpApp().app).simulate_request(method, path)
    assert error(result)[:2] == (405, "MethodNotAllowed")
    assert set(result.headers["allow"].split(", ")) == {"GET", "HEAD", "OPTIONS"}


@pytest.mark.parametrize(("path", "allowed"), [(PATH, {"POST"}), ("/v2/health/ready", {"GET", "HEAD"})])
def test_options_names_the_methods(path, allowed):
    result = testing.TestClient(HttpApp().app).simulate_options(path)
    assert result.status_code == 200
    assert set(result.headers["allow"].split(", ")) - {"OPTIONS"} == allowed


def test_an_unknown_model_comes_before_the_body():
    http = HttpApp()
    result = testing.TestClient(http.app).simulate_post("/v2/models/nope/infer", body=b"\xff{garbage")
    status, error_type, text = error(result)
    assert (status, error_type) == (404, "NotFoundError")
    assert "nope" in text


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        (OverloadedError("queue full", retry_after_s=3), 429, "3"),
        (UnavailableError("draining"), 503, "1"),
        (UnavailableError("no decode node", retry_after_s=0), 503, "1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_retry_after(refusal, status, retry_after, stream):
    http = HttpApp()
    http.service.refusal = refusal
    headers = {"Accept": "text/event-stream"} if stream else {}
    result = testing.TestClient(http.app).simulate_post(PATH, body=BODY, headers=headers)
    assert error(result)[0] == status
    assert error(result)[2] == str(refusal)
    assert result.headers["retry-after"] == retry_after


def test_a_fault_in_the_body_comes_before_a_refusal():
    http = HttpApp()
    http.service.refusal = UnavailableError("draining")
    result = testing.TestClient(http.app).simulate_post(PATH, body=b"{")
    assert error(result)[0] == 422


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_a_request_that_no_node_came_for_is_refused_like_one_that_did_not_wait(accept):
    """Also before the head of a stream."""
    http = HttpApp()
    http.service.script = Script(end_after=0, outcome="error", error=UnavailableError("no decode node is alive"))
    result = testing.TestClient(http.app).simulate_post(PATH, body=BODY, headers={"Accept": accept})
    assert error(result)[0] == 503
    assert result.headers["retry-after"] == "1"
    assert "text/event-stream" not in result.headers["content-type"]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (Script(end_after=3, outcome="timeout"), 408),
        (Script(end_after=0, outcome="timeout"), 408),
        (Script(end_after=3, outcome="error", error=GenerationError("logits are not numbers")), 424),
        (Script(end_after=3, outcome="error", error=UnavailableError("no node left")), 503),
        (Script(end_after=3, outcome="error", error=KvferryError("five losses")), 500),
        (Script(end_after=3, outcome="error"), 500),
    ],
)
def test_a_failed_request_without_events_shows_no_token(script, status):
    http = HttpApp()
    http.service.script = script
    result = testing.TestClient(http.app).simulate_post(PATH, body=BODY)
    assert error(result)[0] == status
    http.service.check_invariants()


@pytest.mark.parametrize("script", [Script(end_after=2, raises=ZeroDivisionError("oops")), Script(forget_end=True)])
def test_a_bug_in_the_service_is_a_500_with_a_traceback_in_the_log_only(script):
    http = HttpApp()
    http.service.script = script
    result = testing.TestClient(http.app).simulate_post(PATH, body=BODY)
    assert error(result)[:2] == (500, "Incomplete Generation")
    assert "oops" not in result.text
    (record,) = http.log.records
    assert record.exc_info is not None
    http.service.check_invariants()


def test_a_generation_without_a_token_is_answered():
    http = HttpApp()
    http.service.script = Script(end_after=0, outcome="stop")
    result = testing.TestClient(http.app).simulate_post(PATH, body=BODY)
    assert result.json["outputs"] == [{"name": "output0", "shape": [1, 0], "datatype": "UINT32", "data": []}]


def test_a_failure_outside_falcon_is_answered_with_json():
    http = HttpApp()
    http.service.not_ready_reason = lambda model=None: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    result = testing.TestClient(http.app).simulate_get("/v2/health/ready", query_string="")
    assert error(result)[:2] == (500, "Incomplete Generation")
