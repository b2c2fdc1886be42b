"""`python -m kvferry.ops.bench.keys`: pieces really go through, with keys and without."""

from pathlib import Path

from kvferry.ops.bench.keys import (
    make_security,
    measure,
)


def test_both_ways_carry_pieces(tmp_path: Path) -> None:
    assert measure(None, 0.05) > 0
    assert measure(make_security(tmp_path), 0.05) > 0
