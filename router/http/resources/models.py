"""What is served: `/v2`, `/v2/models/{model}`, `/v2/models/{model}/config`, `/v1/models`."""

from falcon.asgi import Request, Response

from kvferry.router.http.checks import max_prompt_tokens
from kvferry.router.http.dependencies import AppDependencies
from kvferry.router.http.infer_flow import known_model
from kvferry.router.http.resources.base import GetResource, answer_json
from kvferry.router.http.schemas import DATATYPE, DEFAULT_OUTPUT_NAME

EXTENSIONS = ("model_configuration", "parameters", "schedule_policy")
"""Of the v2 protocol, as far as they are served."""
_INPUT_NAME = "input0"


class ServerResource(GetResource):
    """The server's own name, version and extensions."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """Server metadata."""
        answer_json(
            resp, {"name": self._deps.server_name, "version": self._deps.version, "extensions": list(EXTENSIONS)}
        )


class ModelResource(GetResource):
    """A model's inputs and outputs."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """Model metadata."""
        model = known_model(self._deps, params["model"])
        answer_json(
            resp,
            {
                "name": model.name,
                "platform": self._deps.server_name,
                "inputs": [{"name": _INPUT_NAME, "datatype": DATATYPE, "shape": [1, -1]}],
                "outputs": [{"name": DEFAULT_OUTPUT_NAME, "datatype": DATATYPE, "shape": [1, -1]}],
            },
        )


class ModelConfigResource(GetResource):
    """A model's limits here."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """Model configuration; lengths in tokens."""
        model = known_model(self._deps, params["model"])
        settings = self._deps.settings
        answer_json(
            resp,
            {
                "name": model.name,
                "platform": self._deps.server_name,
                "max_model_len": model.max_model_len,
                "max_position_embeddings": model.max_position_embeddings,
                "max_input_length": settings.max_input_length,
                "max_prompt_tokens": max_prompt_tokens(model, settings.max_input_length),
                "max_iter_times": settings.max_iter_times,
                "max_body_bytes": settings.max_body_bytes,
                "vocab_size": model.vocab_size,
                "eos_token_ids": list(model.eos_token_ids),
                "default_top_k": model.default_top_k,
                "default_do_sample": model.default_do_sample,
            },
        )


class ModelListResource(GetResource):
    """All models that nodes told of, in OpenAI's form."""

    def __init__(self, deps: AppDependencies) -> None:
        self._deps = deps

    async def on_get(self, req: Request, resp: Response, **params: str) -> None:
        """The list, by name; before the first node told of itself it is empty."""
        deps = self._deps
        names = sorted(model.name for model in deps.service.models())
        data = [
            {"id": name, "object": "model", "created": deps.started_at, "owned_by": deps.server_name} for name in names
        ]
        answer_json(resp, {"object": "list", "data": data})
