"""The rules of `POST /v2/models/{model}/infer`, and the JSON of its answer. Pure.

Only the first violation is reported, in this order: inputs, name, shape, datatype, data, id, outputs, parameters,
vocabulary, length. `null` means absent, and unknown keys are ignored. Error texts begin with the place in the body.
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import orjson

from kvferry.common.base.errors import RequestInvalidError
from kvferry.common.base.ids import RequestId
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.router.api import GenerateRequest
from kvferry.router.http.json_body.faults import describe_value
from kvferry.router.http.json_body.long_arrays import ParsedTokenIds
from kvferry.router.http.json_body.reader import JsonBody
from kvferry.router.http.parameters import read_parameters

DATATYPE = "UINT32"
DEFAULT_OUTPUT_NAME = "output0"
MAX_IDS = 1_048_576
"""Longest prompt that the API accepts for any model."""
DEFAULT_PRIORITY = 5
DEFAULT_TIMEOUT_S = 600
_MAX_NAME = 256
_ID = re.compile(r"[A-Za-z0-9_-]{1,256}", re.ASCII)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CheckedInfer:
    """A valid token request."""

    client_id: str
    """The id in the answer: the client's own, else one made by the router."""
    output_name: str
    request: GenerateRequest


def infer_answer(client_id: str, output_name: str, token_ids: Sequence[int]) -> bytes:
    """The JSON of an answer without events: the generated ids only, without the prompt."""
    output = {"name": output_name, "shape": [1, len(token_ids)], "datatype": DATATYPE, "data": list(token_ids)}
    return orjson.dumps({"id": client_id, "outputs": [output]})


def max_prompt_tokens(model: ModelInfo, max_input_length: int) -> int:
    """Longest prompt in tokens for `model` at this router: one output token must fit after it."""
    return min(MAX_IDS, max_input_length, model.max_model_len - 1, model.max_position_embeddings)


def check_infer(
    body: JsonBody,
    model: ModelInfo,
    *,
    max_input_length: int,
    max_iter_times: int,
    request_id: RequestId,
    seed: int,
) -> CheckedInfer:
    """Turn a decoded body into a request with all defaults filled in. Raises RequestInvalidError for the first fault.

    `seed` is used if the client gave none. So is `request_id` as the id in the answer.
    """
    root = _expect(body.root, dict, "body", "a JSON object")
    tensor = _only_element(root.get("inputs"), "inputs")
    _check_name(tensor.get("name"))
    num_ids = _check_shape(tensor.get("shape"))
    if tensor.get("datatype") != DATATYPE:
        _refuse("inputs[0].datatype", f'must be "{DATATYPE}"', tensor.get("datatype"))
    ids = _check_data(body, tensor.get("data"), num_ids)
    client_id = _check_id(root.get("id"))
    output_name = _check_outputs(root.get("outputs"))
    if root.get("parameters") is not None:
        parameters = read_parameters(root.get("parameters"), "parameters")
    else:
        parameters = read_parameters(tensor.get("parameters"), "inputs[0].parameters")
    if ids.outside is not None:
        raise RequestInvalidError(f"inputs[0].data[{ids.outside.index}]: {ids.outside.what}")
    longest = max_prompt_tokens(model, max_input_length)
    if num_ids > longest:
        raise RequestInvalidError(f"inputs[0].shape: n must be at most {longest} for this model, got {num_ids}")
    request = GenerateRequest(
        request_id=request_id,
        spec=RequestSpec(
            model=model.name,
            prompt_token_ids=ids.ids,
            output_token_ids=array("I"),
            sampling=parameters.resolve(model, num_ids, max_iter_times, seed),
            priority=parameters.priority or DEFAULT_PRIORITY,
        ),
        timeout_s=float(parameters.timeout_s or DEFAULT_TIMEOUT_S),
        client_id=client_id or "",
    )
    return CheckedInfer(client_id or request_id, output_name, request)


def _check_name(value: object) -> None:
    name = _expect(value, str, "inputs[0].name", "a string")
    if len(name) > _MAX_NAME:
        _refuse("inputs[0].name", f"must be at most {_MAX_NAME} characters long", value)


def _check_shape(value: object) -> int:
    """n of `[n]` or `[1, n]`."""
    shape = _expect(value, list, "inputs[0].shape", "an array")
    if not 1 <= len(shape) <= 2 or any(type(size) is not int for size in shape) or (len(shape) == 2 and shape[0] != 1):
        _refuse("inputs[0].shape", "must be [n] or [1, n]", value)
    num_ids: int = shape[-1]
    if not 0 < num_ids <= MAX_IDS:
        _refuse("inputs[0].shape", f"n must be in [1, {MAX_IDS}]", num_ids)
    return num_ids


def _check_data(body: JsonBody, value: object, num_ids: int) -> ParsedTokenIds:
    data = _expect(value, list, "inputs[0].data", "a flat array of integers")
    ids = body.token_ids(data)
    if ids.not_integer is not None:
        raise RequestInvalidError(f"inputs[0].data[{ids.not_integer.index}]: {ids.not_integer.what}")
    if ids.count != num_ids:
        raise RequestInvalidError(f"inputs[0].data: {ids.count} ids, but inputs[0].shape says {num_ids}")
    return ids


def _check_id(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _ID.fullmatch(value):
        _refuse("id", "must be 1 to 256 ASCII letters, digits, _ or -", value)
    return value


def _check_outputs(value: object) -> str:
    output = _only_element(value, "outputs")
    return _expect(output.get("name"), str, "outputs[0].name", "a string") or DEFAULT_OUTPUT_NAME


def _only_element(value: object, where: str) -> dict[str, object]:
    elements = _expect(value, list, where, "an array with exactly one element")
    if len(elements) != 1:
        _refuse(where, "must have exactly one element", value)
    return _expect(elements[0], dict, f"{where}[0]", "an object")


def _expect(value: object, kind: type[_T], where: str, what: str) -> _T:
    if value is None:
        raise RequestInvalidError(f"{where}: required; must be {what}")
    if not isinstance(value, kind):
        _refuse(where, f"must be {what}", value)
    return value


def _refuse(where: str, rule: str, value: object) -> NoReturn:
    got = "nothing" if value is None else describe_value(value)
    raise RequestInvalidError(f"{where}: {rule}, got {got}")
