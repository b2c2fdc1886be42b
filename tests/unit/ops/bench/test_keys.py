"""`python -m kvferry.ops.bench.keys`: pieces arrive with and without keys."""

from pathlib import Path

from kvferry.ops.bench.keys import make_security, measure_rate


def test_pieces_arrive_with_and_without_keys(tmp_path: Path) -> None:
    assert measure_rate(None, 0.05) > 0
    assert measure_rate(make_security(tmp_path), 0.05) > 0
