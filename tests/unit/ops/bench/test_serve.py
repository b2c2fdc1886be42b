"""`kvferry bench serve` against an OpenAI-style server, and its report of known times."""

import json

import pytest

from kvferry.ops.bench.serve.load import RequestLoad, arrival_times, prompts
from kvferry.ops.bench.serve.report import Frame, first_gap, make_report, mean_gap, spread, token_gaps
from kvferry.ops.bench.serve.request import RequestOutcome
from kvferry.ops.cli.main import main
from tests.support.openai_server import Peer, openai_server

FRAME = Frame("http://x", "m", "infer", 1, cpu_s=0.5)


def bench(url: str, *words: str, model: str = "m") -> int:
    sizes = ("--input-len", "5", "--output-len", "12", "--requests", "6", "--concurrency", "2", "--warmup", "1")
    return main(["bench", "serve", "--url", url, "--model", model, *sizes, *words])


def load(**changes: object) -> RequestLoad:
    fields = {"requests": 3, "input_len": 4, "output_len": 3, "concurrency": 2, "rate": None, "seed": 1}
    return RequestLoad(**{**fields, "vocab_size": 50, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gives", "counted"), [("ids", "ids"), ("running", "usage"), ("usage", "events"), ("text", "events")]
)
def test_an_openai_style_server_is_measured(capsys: pytest.CaptureFixture[str], gives: str, counted: str) -> None:
    with openai_server(Peer(gives=gives)) as peer:
        assert bench(peer.url, "--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert (report["api"], report["completed"], report["failed"], report["errors"]) == ("openai", 6, 0, {})
    assert (report["output_tokens"], report["input_tokens"], report["short"]) == (72, 30, 0)
    assert report["tokens_counted_by"] == counted
    assert report["warmup_requests"] == 2
    assert len(peer.bodies) == 8
    assert len({tuple(body["prompt"]) for body in peer.bodies}) == 8
    for times in ("ttft_ms", "first_gap_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert 0 <= report[times]["p50"] <= report[times]["p99"] <= report[times]["max"]
    assert report["ttft_ms"]["max"] <= report["e2e_ms"]["max"]
    assert report["client"]["cpu_share"] > 0


@pytest.mark.parametrize("gives", ["ids", "running"])
def test_a_first_event_with_several_tokens_hides_the_first_gap(capsys: pytest.CaptureFixture[str], gives: str) -> None:
    with openai_server(Peer(pieces=(3, 1), gives=gives)) as peer:
        assert bench(peer.url, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert bench(peer.url) == 0
    assert (report["first_gap_ms"], report["first_gap_hidden"]) == (None, 6)
    assert report["output_tokens"] == 72
    assert report["tokens_per_arrival"] >= 2
    table = capsys.readouterr().out
    assert "6 requests: first and second token arrived together" in table
    assert "first to second" not in table


def test_the_servers_final_count_is_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(Peer(pieces=(4,), gives="usage")) as peer:
        assert bench(peer.url, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["output_tokens"], report["tokens_counted_by"], report["short"]) == (72, "events", 0)
    assert report["tokens_per_arrival"] >= 4


def test_extra_fields_that_a_server_rejects_are_omitted(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(Peer(refuses=("return_token_ids", "stream_options"))) as peer:
        assert bench(peer.url, "--json") == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 6
    assert ["return_token_ids" in body for body in peer.bodies[:3]] == [True, False, False]
    assert ["stream_options" in body for body in peer.bodies[:3]] == [True, True, False]
    assert all("stream_options" not in body for body in peer.bodies[3:])


def test_an_open_loop_does_not_wait_for_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(Peer(pause_s=0.005)) as peer:
        words = ["bench", "serve", "--url", peer.url, "--model", "m", "--rate", "500", "--requests", "9"]
        assert main([*words, "--output-len", "4", "--ignore-eos", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["mode"], report["rate"], report["concurrency"], report["completed"]) == ("poisson", 500, None, 9)
    assert all(body["ignore_eos"] is True for body in peer.bodies)


def test_errors_are_counted_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(Peer(fails_from=4)) as peer:
        assert bench(peer.url, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["completed"], report["failed"], report["errors"]) == (2, 4, {"http_503": 4})
    assert report["output_tokens"] == 24


@pytest.mark.parametrize(
    ("peer", "code", "error"),
    [
        (Peer(fails_from=0), 1, "/v1/completions: 503 too busy"),
        (Peer(fails_from=2), 1, "all 6 requests failed, the first: 503 too busy"),
        (Peer(refuses=("prompt",)), 2, "422 unknown field prompt"),
        (Peer(is_unavailable=True), 1, "/v2/models/m/config: 503 no node has registered yet"),
        (Peer(breaks_after=2), 1, "the connection closed before the answer was complete"),
    ],
)
def test_a_server_that_cannot_be_measured_is_a_one_line_error(
    peer: Peer, code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with openai_server(peer):
        assert bench(peer.url) == code
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("kvferry bench serve: error: ")
    assert error in line


def test_https_to_a_plain_http_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(Peer()) as peer:
        assert bench(peer.url.replace("http", "https")) == 2
    assert ": the server speaks http, not https" in capsys.readouterr().err


def test_a_slow_request_is_a_timeout(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(Peer(pause_s=0.5)) as peer:
        assert bench(peer.url, "--output-len", "1", "--timeout", "0.05") == 1
    assert "no complete answer within 0.05 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("--url", "ftp://x"), 2, "expected http://host:port"),
        (("--url", "http://x:port"), 2, "--url: expected http://host:port, got 'http://x:port': "),
        (("--concurrency", "0"), 2, "expected at least 1"),
        (("--rate", "nan"), 2, "above 0"),
        (("--requests", "many"), 2, "--requests"),
        (("--url", "http://127.0.0.1:9"), 1, "http://127.0.0.1:9: Connection refused"),
    ],
)
def test_usage_errors(words: tuple[str, ...], code: int, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        got = main(["bench", "serve", "--model", "m", *words])
    except SystemExit as end:
        got = int(str(end.code))
    assert got == code
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line


@pytest.mark.parametrize(
    ("api", "error"), [("auto", "has neither /v2/models/other nor"), ("infer", "has no /v2"), ("openai", "404")]
)
def test_an_unknown_model_is_a_usage_error(api: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(Peer()) as peer:
        assert bench(peer.url, "--api", api, model="other") == 2
    assert error in capsys.readouterr().err


# -- report


def outcome(*arrivals: tuple[float, int], due: float = 0.0, error: str = "") -> RequestOutcome:
    tokens = sum(count for _, count in arrivals)
    ended = arrivals[-1][0] if arrivals else due + 1.0
    return RequestOutcome(due, sent=due, ended=ended, arrivals=list(arrivals), tokens=tokens, error=error)


def test_gaps_of_tokens_that_arrive_together() -> None:
    several = outcome((1.0, 1), (1.5, 3), (3.5, 1))
    assert list(token_gaps(several)) == [0.5, 0.0, 0.0, 2.0]
    assert first_gap(several) == 0.5
    assert mean_gap(several) == pytest.approx(2.5 / 4)
    assert first_gap(outcome((1.0, 2), (1.5, 1))) is None
    assert mean_gap(outcome((1.0, 5))) is None
    assert list(token_gaps(outcome((1.0, 5)))) == []


def test_times_start_when_a_request_was_due() -> None:
    late = RequestOutcome(due=10.0, sent=10.25, ended=12.0, arrivals=[(11.0, 1), (12.0, 1)], tokens=2)
    report = make_report(FRAME, load(concurrency=None, rate=2.0), [late])
    assert report.ttft_ms is not None
    assert report.e2e_ms is not None
    assert (report.ttft_ms.p50, report.e2e_ms.p50, report.duration_s) == (1000.0, 2000.0, 2.0)
    assert report.client.late_ms_max == 250.0
    assert report.client.cpu_share == 0.25


def test_only_complete_answers_count() -> None:
    whole = outcome((1.0, 1), (2.0, 1), (3.0, 1))
    broken = outcome((0.5, 1), due=0.0, error="cut_off")
    report = make_report(FRAME, load(), [whole, broken])
    assert (report.completed, report.failed, report.errors) == (1, 1, {"cut_off": 1})
    assert (report.output_tokens, report.output_tok_s, report.request_s) == (3, 1.0, round(1 / 3, 3))
    assert report.ttft_ms is not None
    assert report.ttft_ms.p50 == 1000.0


def test_percentiles_are_measured_values() -> None:
    times = spread(i / 1000 for i in range(1, 101))
    assert times is not None
    assert (times.mean, times.p50, times.p90, times.p99, times.max) == (50.5, 50.0, 90.0, 99.0, 100.0)
    assert spread([]) is None


def test_the_same_seed_gives_the_same_load() -> None:
    first = load()
    assert prompts(first, 3, "load") == prompts(first, 3, "load")
    assert prompts(first, 3, "load") != prompts(first, 3, "warm-up")
    assert prompts(first, 3, "load") != prompts(load(seed=2), 3, "load")
    assert all(0 <= token_id < 50 for prompt in prompts(first, 20, "load") for token_id in prompt)
    times = arrival_times(load(rate=100.0, concurrency=None), 2000)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] / 1999 == pytest.approx(0.01, rel=0.1)
