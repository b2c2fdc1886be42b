"""The cluster of the end-to-end tests: a tiny random Llama behind real gunicorn and real nodes, shared by the cheap
tests; tests in which something dies start their own."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.support.eventually import PATIENCE_S
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.node_watch import NodeWatch
from tests.support.serve import Served, ServeOptions, serving
from tests.support.tiny_llama import make_checkpoint, reference_tokens

MODEL = "m"
"""The name that the shared table of cases has."""


class Reference:
    """The checkpoint, and what transformers makes of it."""

    def __init__(self, path: Path, model: Any, tokenizer: Tokenizer) -> None:
        self.path = path
        self._model = model
        self._tokenizer = tokenizer

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        """Greedy continuation."""
        return reference_tokens(self._model, prompt, count)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


class Serve(Protocol):
    """Starts a cluster of its own."""

    def __call__(self, **options: Any) -> AbstractContextManager[Served]: ...


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A tiny random model with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("e2e") / MODEL
    model = make_checkpoint(
        path, vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    alphabet = {token: index for index, token in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(path / "tokenizer.json"))
    return Reference(path, model, tokenizer)


@pytest.fixture(scope="session")
def serve(reference: Reference) -> Serve:
    """Starts clusters with the tiny model; `settings` are `--set` keys and values.

    A node that is silent is waited for: another process may have died, or the machine be busy. That is no 503.
    """

    def start(*, settings: Mapping[str, object] | None = None, **options: Any) -> AbstractContextManager[Served]:
        settings = {"timers.new_request_wait_s": PATIENCE_S, **(settings or {})}
        return serving(ServeOptions(reference.path, settings=settings, **options))

    return start


@pytest.fixture(scope="session")
def served(serve: Serve) -> Iterator[Served]:
    """The shared cluster: two workers, a prefill and a decode node."""
    with serve() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def watch(served: Served) -> Iterator[NodeWatch]:
    """A look at the shared cluster's nodes."""
    with NodeWatch(served.members_endpoint()) as watch:
        yield watch


@pytest.fixture(scope="session")
def http(served: Served) -> Iterator[httpx.Client]:
    """One keep-alive client of the shared cluster."""
    with served.client() as client:
        yield client
