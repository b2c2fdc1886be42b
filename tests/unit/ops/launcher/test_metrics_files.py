"""Metrics files have their disk space reserved before they are mapped; a worker without space serves nevertheless."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.ops.launcher.metrics_files import (
    KINDS,
    METRICS_DIR_ENV,
    RESERVED_BYTES,
    forget_gauges,
    reserve_metrics_files,
)

_WORKER = """
import os, sys
from kvferry.ops.launcher.metrics_files import reserve_metrics_files
reserve_metrics_files(os.environ, os.getpid())
from prometheus_client import CollectorRegistry
from kvferry.router.api import EndEvent, ServiceCounts, Usage
from kvferry.router.http.metrics import metrics_from_environment
metrics = metrics_from_environment(os.environ, CollectorRegistry())
for model in map(str, range(int(sys.argv[1]))):
    metrics.received(model)
    metrics.submitted(model)
    metrics.first_token(model, 0.1)
    metrics.generated(model, EndEvent("length", Usage(3, 4)), 1.0, 0.5)
    metrics.observe_service((model,), ServiceCounts({}, {}, {}, {}))
    metrics.generation_over(model, had_tokens=True)
print(metrics.reads_files)
"""


def run_worker(directory: Path, models: int) -> str:
    environment = {**os.environ, METRICS_DIR_ENV: str(directory)}
    command = [sys.executable, "-c", _WORKER, str(models)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60).stdout.decode().strip()


def test_no_file_is_sparse_or_grows_with_twenty_models(tmp_path: Path):
    assert run_worker(tmp_path, 20) == "True"
    files = sorted(tmp_path.iterdir())
    assert sorted(file.name.rpartition("_")[0] for file in files) == sorted(KINDS)
    for file in files:
        assert file.stat().st_size == RESERVED_BYTES
        assert file.stat().st_blocks * 512 >= RESERVED_BYTES


def test_a_worker_without_space_serves_without_files(tmp_path: Path):
    assert run_worker(tmp_path / "nowhere", 1) == "False"


def test_a_partial_reservation_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    reserved = []

    def full_at_the_third(fd: int, offset: int, size: int) -> None:
        reserved.append(size)
        if len(reserved) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full_at_the_third)
    environ = {METRICS_DIR_ENV: str(tmp_path), "OTHER": "x"}
    reserve_metrics_files(environ, 5)
    assert environ == {"OTHER": "x"}
    assert list(tmp_path.iterdir()) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: cannot reserve space for metrics (No space left on device): /metrics reports one worker only"
    ]


def test_gauges_of_a_worker_that_exited_are_removed(tmp_path: Path):
    environ = {METRICS_DIR_ENV: str(tmp_path)}
    for pid in (7, 77):
        reserve_metrics_files(environ, pid)
    forget_gauges(environ, 7)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        ["counter_7.db", "histogram_7.db", *(f"{kind}_77.db" for kind in KINDS)]
    )
    forget_gauges({}, 77)
