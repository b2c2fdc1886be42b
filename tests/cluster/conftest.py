"""The in-process cluster as a fixture: `async with cluster(prefill=2) as c: ...`."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.device.base import Device
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.models.load import LoadedModel, load_model
from tests.support.cluster import MODEL, Cluster, ClusterOptions, running_cluster
from tests.support.tiny_llama import make_checkpoint

MakeCluster = Callable[..., AbstractAsyncContextManager[Cluster]]


@pytest.fixture(scope="session")
def cpu() -> Device:
    """One CPU device for all nodes."""
    return CpuDevice(1)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny random checkpoint and the same model in transformers."""
    path = tmp_path_factory.mktemp("tiny") / MODEL
    return path, make_checkpoint(path, eos_token_id=7)


@pytest.fixture(scope="session")
def loaded(reference: tuple[Path, Any], cpu: Device) -> LoadedModel:
    """The tiny model, loaded once; nodes share the weights, which no node writes."""
    return load_model(reference[0], device=cpu, dtype="float32", max_model_len=512, model_name=MODEL, progress=False)


@pytest.fixture
def cluster(loaded: LoadedModel, cpu: Device, tmp_path: Path) -> MakeCluster:
    """Makes clusters out of options."""

    def make(**options: Any) -> AbstractAsyncContextManager[Cluster]:
        return running_cluster(loaded, cpu, str(tmp_path), replace(ClusterOptions(), **options))

    return make
