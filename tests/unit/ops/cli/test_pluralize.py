"""Singular and plural in messages."""

from kvferry.ops.bench.report import EngineReport, MachineFacts, engine_table
from kvferry.ops.cli.pluralize import pluralize


def test_one_is_singular():
    assert [pluralize(number, "token") for number in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]


def test_the_engine_table_has_one_thread():
    report = EngineReport(
        model="m", dtype="float32", quantization="none", threads=1, ops="torch", machine=MachineFacts(1.0, 1.0),
        prefill={}, decode={}, ready_s=1.0, rss_mb=1,
    )  # fmt: skip
    assert "  1 thread  torch" in next(engine_table(report))
