"""Makes checked requests for the router's core and service."""

from array import array
from collections.abc import Iterable

from kvferry.common.base.ids import RequestId
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams
from kvferry.router.api import GenerateRequest


def generate_request(
    request_id: RequestId,
    model: str,
    prompt: Iterable[int],
    sampling: SamplingParams,
    *,
    priority: int = 5,
    timeout_s: float = 600.0,
) -> GenerateRequest:
    """A request as the HTTP layer makes one."""
    spec = RequestSpec(
        model=model,
        prompt_token_ids=array("I", prompt),
        output_token_ids=array("I"),
        sampling=sampling,
        priority=priority,
    )
    return GenerateRequest(request_id, spec, timeout_s)
