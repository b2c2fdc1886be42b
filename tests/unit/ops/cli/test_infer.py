"""`kvferry infer` against a small HTTP server that speaks the token API."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from kvferry.common.base.errors import KvferryError
from kvferry.common.tokenizer import SpecialTokens, Tokenizer
from kvferry.ops import model_store
from kvferry.ops.cli.chat import chat_prompt
from kvferry.ops.cli.infer import answer_lines, show_stream
from kvferry.ops.cli.main import main
from kvferry.ops.cli.token_client import TokenAnswer, TokenClient
from tests.support.tiny_gguf import write_gguf

END = {
    "id": "1",
    "index": 3,
    "token_ids": [],
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0},
    "nodes": {"prefill": "p-0", "decode": "d-0"},
}


def events(*fields: dict[str, object]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in fields)


STREAM = events({"id": "1", "index": 0, "token_ids": [5]}, {"id": "1", "index": 1, "token_ids": [6, 7]}, END)


class Router:
    """The server's answers, and the last request."""

    def __init__(self) -> None:
        self.status = 200
        self.model_status = 200
        """Status of `GET /v2/models/{model}`."""
        self.unary = json.dumps({"id": "1", "outputs": [{"name": "output0", "shape": [1, 2], "data": [5, 6]}]}).encode()
        self.stream = STREAM
        self.url = ""
        self.path = ""
        self.body: dict[str, object] = {}

    def handler(self) -> type[BaseHTTPRequestHandler]:
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(router.model_status, router.unary)

            def do_POST(self) -> None:
                router.path = self.path
                router.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                streams = "text/event-stream" in self.headers.get("Accept", "") and router.status == 200
                answer = router.stream if streams else router.unary
                self._answer(router.status, answer)

            def _answer(self, status: int, answer: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


@pytest.fixture
def router() -> Iterator[Router]:
    answers = Router()
    with ThreadingHTTPServer(("127.0.0.1", 0), answers.handler()) as server:
        answers.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield answers
        server.shutdown()
        thread.join()


def infer(router: Router, *argv: str) -> int:
    return main(["infer", "--url", router.url, "--model", "m", "--tokens", "1,2", *argv])


def test_a_unary_answer_is_printed(router: Router, capsys):
    assert infer(router, "--max-new-tokens", "2") == 0
    assert "ids    [5, 6]\n" in capsys.readouterr().out
    assert router.path == "/v2/models/m/infer"
    assert router.body == {
        "inputs": [{"name": "input0", "shape": [1, 2], "datatype": "UINT32", "data": [1, 2]}],
        "outputs": [{"name": "output0"}],
        "parameters": {"max_new_tokens": 2},
    }


def test_a_streamed_answer_is_printed_with_times_and_nodes(router: Router, capsys):
    assert infer(router, "--stream") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "5 6 7 "
    assert lines[1] == "ids    [5, 6, 7]"
    assert "stop prompt_tokens=2" in lines[2]
    assert [line.split()[0] for line in lines[3:]] == ["TTFT", "TPOT", "nodes"]
    assert lines[5] == "nodes  prefill=p-0 decode=d-0"


def test_json_is_one_object(router: Router, capsys):
    assert infer(router, "--stream", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["token_ids"] == [5, 6, 7]
    assert answer["finish_reason"] == "stop"
    assert answer["nodes"] == {"prefill": "p-0", "decode": "d-0"}
    assert 0 <= answer["tpot_s"] <= answer["total_s"]
    assert 0 < answer["ttft_s"] <= answer["total_s"]
    assert infer(router, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["token_ids"], answer["ttft_s"], answer["nodes"]) == ([5, 6], None, None)


def test_sampling_options_become_parameters(router: Router):
    flags = "--do-sample --temperature 0.5 --top-k 10 --top-p 0.9 --seed 3 --repetition-penalty 1.1 --priority 2"
    assert infer(router, *flags.split(), "--timeout", "9") == 0
    assert router.body["parameters"] == {
        "max_new_tokens": 20,
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 10,
        "top_p": 0.9,
        "seed": 3,
        "repetition_penalty": 1.1,
        "priority": 2,
        "timeout": 9,
    }


def test_an_answer_of_one_token_has_no_decode_node(router: Router, capsys):
    ended = END | {"index": 1, "nodes": {"prefill": "p-0", "decode": ""}}
    router.stream = events({"id": "1", "index": 0, "token_ids": [5]}, ended)
    assert infer(router, "--stream") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nodes  prefill=p-0"
    assert infer(router, "--stream", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["nodes"], answer["tpot_s"]) == ({"prefill": "p-0", "decode": None}, None)


@pytest.mark.parametrize("mode", [[], ["--stream"]])
def test_a_refusal_is_reported_with_the_routers_text(router: Router, capsys, mode):
    router.status, router.unary = 429, b'{"error": "the queue is full", "error_type": "Too Many Requests"}'
    assert infer(router, *mode) == 1
    assert capsys.readouterr().err == "kvferry infer: error: 429 Too Many Requests: the queue is full\n"


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (events({"id": "1", "index": 0, "token_ids": [5]}), "ended after 1 token without a finish_reason"),
        (events({"id": "1", "index": 1, "token_ids": [5]}), "jumped from index 0 to 1"),
        (events({"error": "lost", "error_type": "Incomplete Generation", "finish_reason": "error"}), "after 0 tokens"),
        (events({"id": "1", "index": 0, "token_ids": ["5"]}), "something other than token ids"),
        (b"data: {\n\n", "expected an event"),
        (b"data: 5\n\n", "expected an event"),
        (b"", "ended after 0 tokens"),
    ],
)
def test_a_broken_stream_is_an_error(router: Router, capsys, stream, words):
    router.stream = stream
    assert infer(router, "--stream", "--json") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"outputs": []}', b'{"outputs": [{"data": 5}]}'])
def test_an_invalid_answer_is_an_error(router: Router, capsys, answer):
    router.unary = answer
    assert infer(router) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unreachable_router_is_an_error(router: Router, capsys):
    assert main(["infer", "--url", "http://127.0.0.1:1", "--model", "m", "--tokens", "1"]) == 1
    err = capsys.readouterr().err
    assert err == "kvferry infer: error: http://127.0.0.1:1: Connection refused\n"


def test_text_without_a_tokenizer_is_a_usage_error(router: Router, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    assert main(["infer", "--url", router.url, "--model", "m", "--text", "hi"]) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_only_the_small_model_has_a_tokenizer_by_default(router: Router, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    path = model_store.model_path()
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(model_store.GGUF_BYTES)
    assert main(["infer", "--url", router.url, "--model", "llama", "--text", "hi"]) == 2
    assert capsys.readouterr().err == (
        "kvferry infer: error: --text requires the tokenizer of model llama: "
        "name its HuggingFace directory or GGUF file with --tokenizer PATH\n"
    )
    assert main(["infer", "--url", router.url, "--model", model_store.MODEL_NAME, "--text", "hi"]) == 2
    assert str(path) in capsys.readouterr().err, "its tokenizer is used; here it is damaged"
    assert router.body == {}


def test_text_for_the_small_model_names_the_command_that_fetches_it(router: Router, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    for url in (router.url, "http://127.0.0.1:1"):
        assert main(["infer", "--url", url, "--model", model_store.MODEL_NAME, "--text", "hi"]) == 2
        assert "fetch the model with python -m kvferry.ops.model_store" in capsys.readouterr().err


def test_text_for_an_unknown_model_reports_the_servers_error(router: Router, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    router.model_status, router.unary = 404, b'{"error": "known models: m", "error_type": "NotFoundError"}'
    assert main(["infer", "--url", router.url, "--model", "llama", "--text", "hi"]) == 2
    assert capsys.readouterr().err == "kvferry infer: error: 404 NotFoundError: known models: m\n"
    router.model_status = 503
    assert main(["infer", "--url", router.url, "--model", "llama", "--text", "hi"]) == 2
    assert "--tokenizer PATH" in capsys.readouterr().err


def test_https_to_a_plain_http_server_is_reported(router: Router, capsys):
    url = router.url.replace("http", "https")
    assert main(["infer", "--url", url, "--model", "m", "--tokens", "1"]) == 2
    assert capsys.readouterr().err == f"kvferry infer: error: {url}: the server speaks http, not https\n"


@pytest.mark.parametrize(("option", "words"), [("--text", "--text is empty"), ("--tokens", "--tokens: expected")])
def test_an_empty_prompt_is_a_usage_error(router: Router, capsys, tmp_path, option, words):
    write_gguf(tmp_path / "m.gguf")
    tokenizer = ["--tokenizer", str(tmp_path / "m.gguf")]
    assert main(["infer", "--url", router.url, "--model", "m", option, "", *tokenizer]) == 2
    assert words in capsys.readouterr().err
    assert router.body == {}


def test_a_limit_of_the_server_is_reported(router: Router, capsys):
    router.stream = STREAM.replace(b'"stop"', b'"length"')
    assert infer(router, "--stream", "--max-new-tokens", "100000") == 0
    out = capsys.readouterr().out
    assert "tokens 3 of at most 100000 in " in out
    assert "note   100000 were requested; this server's limit is lower\n" in out
    assert infer(router, "--stream", "--max-new-tokens", "3") == 0
    assert "note" not in capsys.readouterr().out
    assert infer(router, "--max-new-tokens", "9") == 0
    assert "tokens 2 of at most 9 in " in capsys.readouterr().out, "a unary answer has no finish_reason"


def test_streamed_text_is_not_printed_again(router: Router, capsys, tmp_path):
    write_gguf(tmp_path / "m.gguf")
    assert infer(router, "--stream", "--tokenizer", str(tmp_path / "m.gguf")) == 0
    assert not any(line.startswith("text ") for line in capsys.readouterr().out.splitlines())
    assert infer(router, "--tokenizer", str(tmp_path / "m.gguf")) == 0
    assert any(line.startswith("text ") for line in capsys.readouterr().out.splitlines())


def test_a_model_name_is_quoted_in_the_path(router: Router):
    with TokenClient(router.url, "a b") as client:
        client.infer([1], {})
    assert router.path == "/v2/models/a%20b/infer"


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
)


def words_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    vocab = {
        word: index for index, word in enumerate(["<unk>", "<user>", "<go>", "hello", "you", "three", "four", "five"])
    }
    backend = Backend(WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return Tokenizer(backend, SpecialTokens(), template)


def test_the_chat_template_wraps_a_question():
    assert chat_prompt(words_tokenizer(), "hello you") == [1, 3, 4, 2]


@pytest.mark.parametrize(
    "template", [None, "{% if %}", "{{ messages.__class__.__mro__ }}{{ ().__class__.x }}{{ 1/0 }}"]
)
def test_a_broken_template_is_an_error(template):
    with pytest.raises(KvferryError, match="chat template"):
        chat_prompt(words_tokenizer(template), "hello")


def test_text_is_printed_as_it_arrives(router: Router, capsys):
    tokenizer = words_tokenizer()
    with TokenClient(router.url, "m") as client:
        answer = show_stream(client, [1], {}, tokenizer)
    assert capsys.readouterr().out.split() == ["three", "four", "five"]
    assert answer_lines(answer, tokenizer.decode(answer.token_ids), 3)[0] == "text   'three four five'"


def test_a_broken_stream_ends_its_line(router: Router, capsys):
    router.stream = events({"id": "1", "index": 0, "token_ids": [5, 6]})
    assert infer(router, "--stream") == 1
    assert capsys.readouterr().out == "5 6 \n"
    router.stream = b""
    assert infer(router, "--stream") == 1
    assert capsys.readouterr().out == ""


def test_one_token_has_no_tpot():
    lines = answer_lines(TokenAnswer([5], 0.5, ttft_s=0.25), None, 1)
    assert lines == ["ids    [5]", "tokens 1 of at most 1 in 0.500 s", "TTFT   250.0 ms"]
