"""Checks the page on the HTTP API against the code: paths, fields, parameters, events, errors, metrics, examples."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from falcon import testing
from prometheus_client import CollectorRegistry

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.config.docs import section_keys
from kvferry.common.config.schema import section_types
from kvferry.router.api import EndEvent, TokensEvent, Usage
from kvferry.router.http import errors
from kvferry.router.http.json_body.reader import PARAMETERS as READ_PARAMETERS
from kvferry.router.http.json_body.reader import decode_known_keys
from kvferry.router.http.metrics import RouterMetrics
from kvferry.router.http.parameters import RequestParameters, read_parameters
from kvferry.router.http.routes import routes
from kvferry.router.http.sse import end_event, tokens_event
from kvferry.router.http.validation import DEFAULT_PRIORITY, DEFAULT_TIMEOUT_S, infer_answer
from tests.support.fake_service import MODEL
from tests.support.http_app import HttpApp

PAGE = (Path(__file__).parents[4] / "ops" / "docs" / "http.md").read_text(encoding="utf-8")


def rows(first_head: str) -> list[list[str]]:
    """The cells of the only table with that head in its first column, without backticks."""
    (table,) = re.findall(rf"^\| {re.escape(first_head)} \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE)
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def examples(after: str) -> str:
    """The first block of code after that heading."""
    _, _, rest = PAGE.partition(f"\n{after}\n")
    found: list[str] = re.findall(r"```\w*\n(.*?)```", rest, flags=re.DOTALL)
    return found[0]


PARAMETERS = {name: (rule, default) for name, rule, default, _ in rows("name | must be")}


def test_the_paths_are_those_of_the_route_table():
    named = {path: method for method, path, _ in rows("method")}
    served = routes(HttpApp().app._deps)
    assert named == {path: "POST" if hasattr(resource, "on_post") else "GET" for path, resource in served}


def test_the_parameters_are_those_that_are_read_in_the_same_order():
    # Unknown keys are left out of a large body.
    sent = {"parameters": dict.fromkeys(PARAMETERS, 1) | {"another": "x" * 100_000}}
    kept = decode_known_keys(json.dumps(sent).encode())
    assert isinstance(kept, dict)
    assert list(kept["parameters"]) == list(PARAMETERS)
    assert list(READ_PARAMETERS) == list(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_must_be_what_the_page_says(name: str):
    with pytest.raises(RequestInvalidError) as raised:
        read_parameters({name: {}}, "parameters")
    assert str(raised.value) == f"parameters.{name}: must be {PARAMETERS[name][0]}, got an object"


def test_the_first_fault_is_reported_in_the_order_of_the_table():
    wrong: dict[str, object] = {name: {} for name in PARAMETERS}
    for name in PARAMETERS:
        with pytest.raises(RequestInvalidError, match=rf"^parameters\.{name}:"):
            read_parameters(wrong, "parameters")
        del wrong[name]


def test_defaults_are_those_of_the_page():
    sampling = RequestParameters().resolve(MODEL, 3, 512, seed=77)
    taken = {name: getattr(sampling, name, None) for name in PARAMETERS}
    taken |= {"priority": DEFAULT_PRIORITY, "timeout": DEFAULT_TIMEOUT_S}
    worded = {"seed": "drawn", "top_k": "the model's", "do_sample": "see below"}
    for name, (_, default) in PARAMETERS.items():
        assert default == worded.get(name, "-" if taken[name] is None else str(taken[name])), name
    assert (sampling.seed, sampling.top_k, sampling.do_sample) == (77, MODEL.default_top_k, MODEL.default_do_sample)


@pytest.mark.parametrize("field", [name for name, _ in rows("field | rule")])
def test_a_required_field_must_be_present(field: str):
    (rule,) = [text for name, text in rows("field | rule") if name == field]
    body = json.loads(examples("## The request"))
    place = body
    *way, last = re.findall(r"[a-z]+|\d", field)
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    del place[last]
    result = _post(json.dumps(body).encode())
    assert result.status_code == (422 if rule.startswith("required") else 200)
    if result.status_code == 422:
        assert result.json["error"].startswith(f"{field}: ")
    assert result.json.keys() == ({"id", "outputs"} if result.status_code == 200 else {"error", "error_type"})


def test_the_answer_on_the_page_is_correct():
    example = json.loads(examples("## One JSON object"))
    (output,) = example["outputs"]
    assert examples("## One JSON object").encode().strip() == infer_answer(
        example["id"], output["name"], output["data"]
    )


def test_the_list_of_models_on_the_page_is_correct():
    made = testing.TestClient(HttpApp(started_at=1767225600).app).simulate_get("/v1/models")
    (block,) = re.findall(r'^\{"object".*$', PAGE, flags=re.MULTILINE)
    assert made.text == block


def test_the_events_on_the_page_are_correct():
    *tokens, end = _events(examples("## Events"))
    made = [tokens_event("42", TokensEvent(event["index"], tuple(event["token_ids"]))) for event in tokens]
    usage = Usage(**end["usage"])
    ended = EndEvent(end["finish_reason"], usage, end["nodes"]["prefill"], end["nodes"]["decode"])
    made.append(end_event("42", len(tokens), ended))
    assert b"".join(made).decode() == examples("## Events")
    assert [token for event in tokens for token in event["token_ids"]] == json.loads(examples("## One JSON object"))[
        "outputs"
    ][0]["data"]


def test_the_error_event_on_the_page_is_correct():
    block = re.findall(r"router's own fault\):\n\n```\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    (event,) = _events(block)
    usage, nodes = Usage(**event["usage"]), event["nodes"]
    ended = EndEvent(event["finish_reason"], usage, nodes["prefill"], nodes["decode"])
    assert end_event(event["id"], usage.completion_tokens, ended).decode() == block


def test_the_error_on_the_page_is_correct():
    body = json.loads(examples("## The request"))
    body["parameters"] = {"top_p": 2}
    result = _post(json.dumps(body).encode())
    assert result.status_code == 422
    assert result.text == examples("## Errors").strip()


def test_statuses_and_types_are_those_of_the_code():
    named = {(int(status), error_type) for status, error_type, _ in rows("status")}
    in_code = {(status, error_type) for _, status, error_type in errors._KINDS} | set(errors._FALCON_TYPES.items())
    assert in_code - named == {(errors.CLIENT_GONE_STATUS, "Client Closed Request")}
    assert named <= in_code
    assert f"has {errors.CLIENT_GONE_STATUS} for a client that left" in PAGE


def test_the_metrics_are_those_of_the_code():
    registry = CollectorRegistry()
    RouterMetrics(registry)
    made = [
        [family.name + "_total" * (family.type == "counter"), family.type, family.documentation]
        for family in registry.collect()
    ]
    assert rows("name | kind") == made


def test_settings_on_the_page_exist():
    known = {f"{key.section}.{key.name}" for name, kind in section_types().items() for key in section_keys(name, kind)}
    named = set(re.findall(r"`((?:router|limits)\.\w+)`", PAGE))
    assert len(named) > 6
    assert named <= known


def _post(body: bytes) -> testing.Result:
    return testing.TestClient(HttpApp().app).simulate_post("/v2/models/m/infer", body=body)


def _events(text: str) -> list[Any]:
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]
