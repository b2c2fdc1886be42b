"""Every rule of the token request, through falcon's test client and through a real server, from one table of cases."""

import asyncio
import json
from dataclasses import replace

import pytest
from falcon import testing

from kvferry.common.config.schema import RouterConfig
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.router.http.json_body import reader
from tests.support.fake_service import MODEL, FakeTokenService, expected_token
from tests.support.http_app import HttpApp, connect, serve
from tests.support.infer_cases import INFER_CASES, InferCase, base, encode

PATH = "/v2/models/m/infer"


def check_answer(case: InferCase, status: int, body: bytes, service: FakeTokenService) -> None:
    answer = json.loads(body)
    assert status == case.status, answer
    if status != 200:
        assert answer.keys() == {"error", "error_type"}
        assert answer["error_type"] == "Input Validation Error"
        assert case.where in answer["error"]
        assert len(answer["error"]) < 300
        assert service.streams == []
        return
    (stream,) = service.streams
    ids = [expected_token(stream.request, i) for i in range(stream.request.spec.sampling.max_new_tokens)]
    assert answer["outputs"] == [
        {"name": case.output_name, "shape": [1, len(ids)], "datatype": "UINT32", "data": ids},
    ]
    assert answer.keys() == {"id", "outputs"}
    assert case.num_tokens is None or len(ids) == case.num_tokens


def test_case_names_are_unique():
    assert len({case.name for case in INFER_CASES}) == len(INFER_CASES)


@pytest.mark.parametrize("case", INFER_CASES, ids=lambda case: case.name)
def test_case(case):
    http = HttpApp()
    result = testing.TestClient(http.app).simulate_post(PATH, body=case.body)
    check_answer(case, result.status_code, result.content, http.service)
    assert result.headers["content-type"] == "application/json"
    assert not http.log.records


@pytest.mark.parametrize("case", INFER_CASES, ids=lambda case: case.name)
def test_case_without_unknown_keys(case, monkeypatch):
    """The code for very large bodies, with bounds at which every body is large."""
    monkeypatch.setattr(reader, "LARGE_BYTES", 0)
    monkeypatch.setattr(reader, "SMALL_BYTES", 40)
    http = HttpApp()
    result = testing.TestClient(http.app).simulate_post(PATH, body=case.body)
    where = case.where.removesuffix("[39999]").removesuffix("[0]") if "data" in case.where else case.where
    check_answer(replace(case, where=where), result.status_code, result.content, http.service)


def test_all_cases_through_a_real_server():
    async def run() -> None:
        http = HttpApp()
        async with serve(http) as port, connect(port) as client:
            for case in INFER_CASES:
                http.service.streams.clear()
                await client.post(PATH, case.body)
                reply = await client.reply()
                check_answer(case, reply.status, reply.body, http.service)
            http.service.check_invariants()

    asyncio.run(run())


@pytest.mark.parametrize("num_ids", [3, 20_000, 300_000])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\r\n\t", " : ")])
def test_prompts_of_any_length_arrive_unchanged(num_ids, separators):
    http = HttpApp(settings=RouterConfig(max_input_length=1_000_000))
    http.service.models_known["m"] = ModelInfo(
        name="m", vocab_size=32000, max_model_len=400_000, max_position_embeddings=400_000
    )
    ids = [(i * 7919) % 32000 for i in range(num_ids)]
    tensor = {"name": "input0", "data": ids, "datatype": "UINT32", "shape": [num_ids]}
    body = json.dumps(base(inputs=[tensor]), separators=separators).encode()
    result = testing.TestClient(http.app).simulate_post(PATH, body=body)
    assert result.status_code == 200
    assert http.service.streams[0].request.spec.prompt_token_ids.tolist() == ids


def test_defaults_are_filled_in():
    http = HttpApp()
    client = testing.TestClient(http.app)
    client.simulate_post(PATH, body=encode(base(parameters=..., id=...)))
    request = http.service.streams[0].request
    assert (request.spec.priority, request.timeout_s, request.client_id, request.spec.model) == (5, 600.0, "", "m")
    sampling = request.spec.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, MODEL.default_top_k, 1.0)
    assert (sampling.repetition_penalty, sampling.do_sample, sampling.seed) == (1.0, False, 7)
    assert sampling.max_new_tokens == 20


@pytest.mark.parametrize(
    ("parameters", "do_sample"),
    [
        ({}, False),
        ({"temperature": 1}, True),
        ({"top_k": 5}, True),
        ({"top_p": 1.0}, True),
        ({"temperature": None, "top_k": None, "top_p": None}, False),
        ({"repetition_penalty": 2, "seed": 4}, False),
        ({"temperature": 1, "do_sample": False}, False),
        ({"do_sample": True}, True),
    ],
)
def test_sampling_follows_from_the_parameters_given(parameters, do_sample):
    http = HttpApp()
    testing.TestClient(http.app).simulate_post(PATH, body=encode(base(parameters=parameters)))
    assert http.service.streams[0].request.spec.sampling.do_sample is do_sample


@pytest.mark.parametrize(("given", "taken"), [(31999, 31999), (32000, 32000), (32001, 32000), (2147483647, 32000)])
def test_top_k_is_at_most_the_vocabulary(given, taken):
    http = HttpApp()
    testing.TestClient(http.app).simulate_post(PATH, body=encode(base(parameters={"top_k": given})))
    assert http.service.streams[0].request.spec.sampling.top_k == taken


@pytest.mark.parametrize(
    ("num_ids", "asked", "tokens"), [(3, 2147483647, 512), (2048, 600, 512), (2048, 511, 511), (3, 7, 7)]
)
def test_output_is_bounded_by_settings_and_model(num_ids, asked, tokens):
    http = HttpApp()
    tensor = {"name": "i", "shape": [num_ids], "datatype": "UINT32", "data": [5] * num_ids}
    body = encode(base(inputs=[tensor], parameters={"max_new_tokens": asked}))
    result = testing.TestClient(http.app).simulate_post(PATH, body=body)
    assert result.json["outputs"][0]["shape"] == [1, tokens]


def test_output_is_bounded_by_the_length_that_the_prompt_leaves():
    http = HttpApp(settings=RouterConfig(max_input_length=4000, max_iter_times=5000))
    tensor = {"name": "i", "shape": [2550], "datatype": "UINT32", "data": [5] * 2550}
    body = encode(base(inputs=[tensor], parameters={"max_new_tokens": 600}))
    result = testing.TestClient(http.app).simulate_post(PATH, body=body)
    assert result.json["outputs"][0]["shape"] == [1, 10]
