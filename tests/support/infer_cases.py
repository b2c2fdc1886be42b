"""Every rule of `POST /v2/models/{model}/infer` as a table: a body, the status it gets, and what the error speaks of.

For a model "m" with vocabulary 32000, max_input_length 2048, max_model_len 2560, max_iter_times 512, max_body_bytes
40,000,000 and any service that answers. The same table runs against the test client and against real servers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

VOCAB_SIZE = 32000
MAX_INPUT_LENGTH = 2048
MAX_MODEL_LEN = 2560
MAX_ITER_TIMES = 512

_ABSENT = object()


@dataclass(frozen=True)
class InferCase:
    """One request to model "m"."""

    name: str
    body: bytes
    status: int
    where: str = ""
    """Part of the error text; empty where any text will do."""
    output_name: str = "output0"
    num_tokens: int | None = None
    """How many tokens must come, where that is fixed whatever the model says."""


def base(**changes: object) -> dict[str, object]:
    """The base request, with top-level keys replaced; `...` as a value takes one out."""
    body: dict[str, object] = {
        "id": "42",
        "inputs": [tensor()],
        "outputs": [{"name": "output0"}],
        "parameters": {
            "temperature": 0.5, "top_k": 10, "top_p": 0.95, "do_sample": True, "seed": None, "repetition_penalty": 1.03,
            "max_new_tokens": 20, "watermark": True, "priority": 5, "timeout": 10,
        },
    }  # fmt: skip
    return _changed(body, changes)


def tensor(**changes: object) -> dict[str, object]:
    """`inputs[0]` of the base request, changed likewise."""
    return _changed({"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [5, 6, 7]}, changes)


def prompt(num_ids: int, shape_says: int | None = None) -> dict[str, object]:
    """The base request with a prompt of that length."""
    return with_tensor(shape=[1, num_ids if shape_says is None else shape_says], data=[5] * num_ids)


def with_tensor(**changes: object) -> dict[str, object]:
    """The base request with a changed `inputs[0]`."""
    return base(inputs=[tensor(**changes)])


def with_parameters(**changes: object) -> dict[str, object]:
    """The base request with some parameters replaced."""
    parameters = base()["parameters"]
    assert isinstance(parameters, dict)
    return base(parameters=_changed(dict(parameters), changes))


def encode(body: object) -> bytes:
    """JSON, with NaN and infinities as Python writes them."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def _changed(body: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    body.update(changes)
    return {key: value for key, value in body.items() if value is not ...}


def ok(name: str, body: object, *, output_name: str = "output0", num_tokens: int | None = None) -> InferCase:
    return InferCase(name, encode(body), 200, "", output_name, num_tokens)


def bad(name: str, where: str, body: object) -> InferCase:
    return InferCase(name, encode(body), 422, where)


def _all_bad(name: str, where: str, body: Callable[[object], object], *values: object) -> list[InferCase]:
    """One refused case for each value."""
    return [bad(f"{name} {value!r:.20} refused", where, body(value)) for value in values]


def _number(name: str, good: tuple[object, ...], wrong: tuple[object, ...]) -> list[InferCase]:
    """Values of one parameter; `null` is always absent, and a string, an array, an object never will do."""
    cases = [ok(f"{name} {value!r:.20}", with_parameters(**{name: value})) for value in (*good, None, ...)]
    for value in (*wrong, "1", "x", [], [1], {}):
        cases.append(bad(f"{name} {value!r:.20} refused", f"parameters.{name}", with_parameters(**{name: value})))
    return cases


_INT32 = 2147483647
_BOOLS: tuple[object, ...] = (True, False)
_NOT_INT: tuple[object, ...] = (1.0, 1.5, True, False)
_INT32_GOOD: tuple[object, ...] = (1, 20, _INT32)
_INT32_WRONG: tuple[object, ...] = (0, -1, _INT32 + 1, 2**70, 10**400, *_NOT_INT)

PARAMETER_CASES: list[InferCase] = [
    *_number("temperature", (1, 0.001, 100, 1.1e-6, 0.5, 1e308, 2**70), (0, 0.0, -1, 1e-6, 10**400, True)),
    *_number("top_k", _INT32_GOOD, _INT32_WRONG),
    *_number("top_p", (1, 1.0, 0.5, 1.1e-6), (0, 1e-6, 1.0000001, 2, -0.5, True)),
    *_number("do_sample", _BOOLS, (0, 1, 0.0, "true")),
    *_number("seed", (1, 2**64 - 1, 2**63), (0, -1, 2**64, 2**70, *_NOT_INT)),
    *_number("repetition_penalty", (1, 2.5, 100, 0.001), (0, -1, 0.0, 10**400, False)),
    *_number("max_new_tokens", _INT32_GOOD, _INT32_WRONG),
    *_number("watermark", _BOOLS, (0, 1, "false")),
    *_number("details", _BOOLS, (0, 1, "false")),
    *_number("batch_size", _INT32_GOOD, _INT32_WRONG),
    *_number("priority", (1, 2, 5), (0, 6, -1, *_NOT_INT)),
    *_number("timeout", (1, 10, 3600), (0, 3601, -1, *_NOT_INT)),
    ok("parameters null", base(parameters=None)),
    ok("parameters absent", base(parameters=...)),
    ok("parameters empty", base(parameters={})),
    ok("parameters unknown keys", with_parameters(x=1, temperatur=-1, y={"temperature": 0})),
    *_all_bad("parameters", "parameters: ", lambda value: base(parameters=value), [], 5, "x", True, 0, ""),
    ok("one token", with_parameters(max_new_tokens=1), num_tokens=1),
    bad("parameters in inputs[0]", "inputs[0].parameters.top_k",
        base(inputs=[tensor(parameters={"top_k": 0})], parameters=...)),
    bad("parameters null, then those in inputs[0]", "inputs[0].parameters.top_k",
        base(inputs=[tensor(parameters={"top_k": 0})], parameters=None)),
    ok("parameters at both places: the top one counts", base(inputs=[tensor(parameters={"top_k": 0})], parameters={})),
    ok("one token asked for in inputs[0]",
       base(inputs=[tensor(parameters={"max_new_tokens": 1})], parameters=...), num_tokens=1),
    bad("parameters in inputs[0] no object", "inputs[0].parameters: ",
        base(inputs=[tensor(parameters=[])], parameters=...)),
]  # fmt: skip

TENSOR_CASES: list[InferCase] = [
    *_all_bad("inputs", "inputs", lambda value: base(inputs=value),
              ..., None, {}, [], [tensor(), tensor()], [5], [None], [[]], "x", 0, True, {"0": tensor()}),
    ok("name other", with_tensor(name="whatever")),
    ok("name empty", with_tensor(name="")),
    ok("name 256", with_tensor(name="n" * 256)),
    *_all_bad("name", "inputs[0].name", lambda value: with_tensor(name=value), ..., None, 5, "n" * 257, []),
    ok("shape [n]", with_tensor(shape=[3])),
    *_all_bad("shape", "inputs[0].shape", lambda value: with_tensor(shape=value),
              ..., None, [], [1, 1, 3], [3, 1], [1.0, 3], [True, 3], [1, 3.0], ["1", 3], [1, "3"], [1, None], 3,
              "3", {}, [[1, 3]], [1, -3], [-1, 3], [0, 3], [1, 2**70], [3.0], [True], [None]),
    bad("shape [1,0] with data []", "inputs[0].shape", with_tensor(shape=[1, 0], data=[])),
    bad("shape [0] with data []", "inputs[0].shape", with_tensor(shape=[0], data=[])),
    bad("shape [1,1048577]", "inputs[0].shape", with_tensor(shape=[1, 1048577])),
    *_all_bad("datatype", "inputs[0].datatype", lambda value: with_tensor(datatype=value),
              ..., None, "INT64", "uint32", "UINT32 ", "", 5, ["UINT32"]),
    bad("shape says 4, data has 3", "inputs[0].data", with_tensor(shape=[1, 4])),
    bad("shape says 2, data has 3", "inputs[0].data", with_tensor(shape=[1, 2])),
    bad("shape says 1, data empty", "inputs[0].data", with_tensor(shape=[1, 1], data=[])),
    *_all_bad("data", "inputs[0].data", lambda value: with_tensor(data=value),
              ..., None, [[5, 6, 7]], [5, 6, "7"], [5, 6, 7.0], [5, 6, True], [5, 6, None], [5, 6, [7]],
              [5, 6, {}], 5, "567", {}, [5, 6, 7.5]),
    ok("data at the vocabulary's end", with_tensor(data=[5, 6, VOCAB_SIZE - 1])),
    ok("data zero", with_tensor(data=[0, 0, 0])),
    *_all_bad("last id", "inputs[0].data[2]", lambda value: with_tensor(data=[5, 6, value]),
              VOCAB_SIZE, -1, 2**31, 2**32, 2**32 + 5, 2**64, 2**70),
    ok("one id", with_tensor(shape=[1, 1], data=[5])),
    ok("n 2048", prompt(MAX_INPUT_LENGTH)),
    bad("n 2049", "inputs[0].shape", prompt(MAX_INPUT_LENGTH + 1)),
    ok("unknown keys in inputs[0]", with_tensor(x=[1], Shape=5)),
]  # fmt: skip

ENVELOPE_CASES: list[InferCase] = [
    ok("base", base()),
    *(ok(f"id {value!r:.10}", base(id=value)) for value in (None, "a", "a-b_C9", "i" * 256)),
    ok("id absent", base(id=...)),
    *_all_bad("id", "id: ", lambda value: base(id=value),
              "", "i" * 257, "a b", "a/b", "é", "a\n", "٣", "a.b", 42, [], {}, True, 0),
    *_all_bad("outputs", "outputs", lambda value: base(outputs=value),
              ..., None, [], [{"name": "a"}, {"name": "b"}], [{}], [5], [{"name": None}], [{"name": 5}], {}, "x"),
    ok("outputs named", base(outputs=[{"name": "my_out"}]), output_name="my_out"),
    ok("outputs named with nothing", base(outputs=[{"name": ""}])),
    ok("outputs named at length", base(outputs=[{"name": "é" * 5000}]), output_name="é" * 5000),
    ok("outputs unknown keys", base(outputs=[{"name": "o", "x": 1}]), output_name="o"),
    ok("unknown keys", base(x=1, Inputs=[], y={"id": ""})),
]  # fmt: skip

ORDER_CASES: list[InferCase] = [
    bad("two faults: shape and temperature", "inputs[0].shape",
        base(inputs=[tensor(shape=[1, 0])], parameters={"temperature": 0})),
    bad("two faults: inputs and id", "inputs: ", base(inputs=None, id="")),
    bad("two faults: name and shape", "inputs[0].name", with_tensor(name=5, shape=5)),
    bad("two faults: shape and datatype", "inputs[0].shape", with_tensor(shape=5, datatype=5)),
    bad("two faults: datatype and data", "inputs[0].datatype", with_tensor(datatype=5, data=5)),
    bad("two faults: data and id", "inputs[0].data", base(inputs=[tensor(data=5)], id="")),
    bad("two faults: id and outputs", "id: ", base(id="", outputs=None)),
    bad("two faults: outputs and parameters", "outputs: ", base(outputs=None, parameters=5)),
    bad("two faults: vocabulary and parameters", "parameters.timeout",
        base(inputs=[tensor(data=[5, 6, VOCAB_SIZE])], parameters={"timeout": 0})),
    bad("two faults: vocabulary and a string behind it", "inputs[0].data[2]", with_tensor(data=[VOCAB_SIZE, 6, "7"])),
    bad("two faults: temperature and timeout", "parameters.temperature",
        base(parameters={"timeout": 0, "temperature": 0})),
    bad("two faults: JSON and shape", "body", encode(with_tensor(shape=5))[:-1]),
]  # fmt: skip

_TEXT = encode(base())
JSON_CASES: list[InferCase] = [
    bad("empty body", "body", b""),
    bad("blank body", "body", b" \n"),
    bad("unfinished", "body", b"{"),
    *(bad(f"not an object: {text!r}", "body", text) for text in (b"[]", b"5", b'"x"', b"null", b"true")),
    bad("not UTF-8", "body", _TEXT.replace(b"input0", b"input\xff")),
    bad("not UTF-8 in an unknown key", "body", b'{"x":"\xff",' + _TEXT[1:]),
    bad("UTF-16", "body", _TEXT.decode().encode("utf-16")),
    bad("a lone surrogate", "body", b'{"x":"\\ud800",' + _TEXT[1:]),
    bad("nested 100,000 deep", "body", b"[" * 100_000),
    bad("nested 100,000 deep and closed, in an unknown key", "body",
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"," + _TEXT[1:]),
    bad("objects nested 100,000 deep", "body", b'{"x":' * 100_000 + b"1" + b"}" * 100_000),
    bad("trailing text", "body", _TEXT + b"x"),
    bad("trailing comma", "body", _TEXT[:-1] + b",}"),
    bad("NaN", "body", with_parameters(temperature=float("nan"))),
    bad("Infinity", "body", with_parameters(temperature=float("inf"))),
    bad("-Infinity", "body", with_parameters(repetition_penalty=float("-inf"))),
    bad("a number beyond float", "body", _TEXT.replace(b"0.95", b"1e999")),
    bad("an integer of 5,000 digits", "", _TEXT.replace(b"[5, 6, 7]", b"[5, 6, " + b"9" * 5000 + b"]")),
    bad("a leading zero", "body", _TEXT.replace(b"[5, 6, 7]", b"[5, 6, 07]")),
    ok("blanks around", b" \r\n\t" + _TEXT + b" \r\n\t"),
    ok("a key twice: the last counts", b'{"inputs":5,' + _TEXT[1:]),
    ok("escapes in keys and values", _TEXT.replace(b'"id"', b'"\\u0069d"').replace(b"UINT32", b"\\u0055INT32")),
    ok("minus zero", _TEXT.replace(b"[5, 6, 7]", b"[5, 6, -0]")),
]  # fmt: skip

_LONG = encode(prompt(40_000))
_RUN = encode([5] * 40_000)
_JUNK = b'{"junk":[' + b",".join([b'{"a":[1,"],["]}'] * 30_000) + b"],"
LARGE_CASES: list[InferCase] = [
    bad("a long prompt", "inputs[0].shape", _LONG),
    ok("a long array in an unknown key", b'{"x":' + _RUN + b"," + _TEXT[1:]),
    ok("a long array in an unknown key behind", _TEXT[:-1] + b',"x":' + _RUN + b"}"),
    ok("a long array in an unknown key of inputs[0]", _TEXT.replace(b'"name"', b'"x":' + _RUN + b',"name"', 1)),
    ok("a long array inside a string", b'{"x":"' + _RUN + b'",' + _TEXT[1:]),
    ok("a long array inside a string with escapes", b'{"x":"\\\\\\"' + _RUN + b'\\\\",' + _TEXT[1:]),
    ok("a long array of other things", b'{"x":[1.5e3,' + b"null,true,-1.25," * 10_000 + b"false]," + _TEXT[1:]),
    ok("nested long arrays", b'{"x":[[' + _RUN + b"],[" + _RUN + b"]]," + _TEXT[1:]),
    ok("a prompt with 100,000 blanks", _TEXT.replace(b"[5, 6, 7]", b"[5," + b" " * 100_000 + b"6,7 ]")),
    ok("a shape with 100,000 blanks", _TEXT.replace(b"[1, 3]", b"[" + b" " * 100_000 + b"1,3]")),
    ok("an empty array with 100,000 blanks", b'{"x":[' + b" " * 100_000 + b"]," + _TEXT[1:]),
    ok("outputs named with a long array", _TEXT.replace(b"output0", _RUN), output_name=_RUN.decode()),
    bad("id with a long array", "id: ", _TEXT.replace(b'"42"', b'"' + _RUN + b'"')),
    bad("name with a long array", "inputs[0].name", _TEXT.replace(b"input0", _RUN)),
    bad("a long array as shape", "inputs[0].shape", _TEXT.replace(b"[1, 3]", _RUN)),
    bad("a long array as id", "id: ", _TEXT.replace(b'"42"', _RUN)),
    bad("a long array as inputs", "inputs", base(inputs=[5] * 40_000)),
    bad("a long array as outputs", "outputs", base(outputs=[5] * 40_000)),
    bad("a long array as top_k", "parameters.top_k", with_parameters(top_k=[5] * 40_000)),
    bad("a long array as parameters", "parameters", base(parameters=[5] * 40_000)),
    bad("a long array as body", "body", _RUN),
    *(bad(f"a long prompt, {what}", where, _LONG.replace(b"5, 5]", text))
      for what, where, text in (
          ("a string last", "inputs[0].data[39999]", b'5, "7"]'),
          ("a float last", "inputs[0].data[39999]", b"5, 7.0]"),
          ("a bool last", "inputs[0].data[39999]", b"5, true]"),
          ("an array last", "inputs[0].data[39999]", b"5, [7]]"),
          ("an object last", "inputs[0].data[39999]", b"5, {}]"),
          ("one too many", "inputs[0].data", b"5, 5, 5]"),
          ("one too few", "inputs[0].data", b"5]"),
          ("out of vocabulary last", "inputs[0].data[39999]", b"5, 32000]"),
          ("negative last", "inputs[0].data[39999]", b"5, -1]"),
          ("2^70 last", "inputs[0].data[39999]", b"5, 1180591620717411303424]"),
          ("a trailing comma", "body", b"5, 5,]"),
          ("two commas", "body", b"5,, 5]"),
          ("no comma", "body", b"5 5, 5]"),
          ("not closed", "body", b"5, 5"),
          ("closed wrongly", "body", b"5, 5}"),
          ("a bare word", "body", b"5, five]"),
          ("NaN", "body", b"5, NaN]"),
          ("not UTF-8", "body", b"5, \xff]"),
          ("a leading zero", "body", b"5, 05]"),
      )),
    bad("a long prompt, a string first", "inputs[0].data[0]", _LONG.replace(b"[5, ", b'["5", ')),
    bad("a long prompt, nested", "inputs[0].data[0]", encode(with_tensor(shape=[40_000], data=[[5] * 40_000]))),
    bad("a long prompt, two faults: shape and JSON", "body",
        _LONG.replace(b"[1, 40000]", b"[5]").replace(b"5, 5]", b"5,]")),
    ok("half a megabyte of junk before", _JUNK + _TEXT[1:]),
    ok("half a megabyte of junk in inputs[0]", _TEXT.replace(b'{"name": "input0"', _JUNK + b'"name": "input0"')),
    ok("half a megabyte of junk in parameters", _TEXT.replace(b'{"temperature"', _JUNK + b'"temperature"')),
    bad("half a megabyte of junk and a fault", "parameters.top_k", _JUNK + encode(with_parameters(top_k=0))[1:]),
    bad("half a megabyte of junk as id", "id: ", _TEXT.replace(b'"42"', _JUNK[:-1] + b"}")),
    bad("half a megabyte of junk as inputs", "inputs", base(inputs=[[1, "x"]] * 60_000)),
    bad("half a megabyte of junk as data", "inputs[0].data", with_tensor(data=[[1, "x"]] * 60_000)),
    bad("half a megabyte of junk as shape", "inputs[0].shape", with_tensor(shape=[[1, "x"]] * 60_000)),
    bad("half a megabyte of junk as temperature", "parameters.temperature",
        with_parameters(temperature=[["x"]] * 90_000)),
    bad("half a megabyte of junk, cut off", "body", _JUNK + _TEXT[1:-1]),
    bad("half a megabyte of junk, not UTF-8", "body", _JUNK + b'"x":"\xff",' + _TEXT[1:]),
    bad("half a megabyte of junk and no more", "inputs: ", _JUNK[:-1] + b"}"),
    bad("half a megabyte that is no object", "body", encode([["x"]] * 90_000)),
]  # fmt: skip

INFER_CASES: list[InferCase] = [
    *ENVELOPE_CASES, *TENSOR_CASES, *PARAMETER_CASES, *ORDER_CASES, *JSON_CASES, *LARGE_CASES,
]  # fmt: skip
