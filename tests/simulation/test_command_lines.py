"""What the commands of the simulation refuse: a range, a name or a number that would try nothing."""

from pathlib import Path

import pytest

from tests.simulation import __main__ as schedules
from tests.simulation import find_defects, torture
from tests.simulation.draw import draw_plan


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "5"], "argument --seeds: expected A:B, 0:100 say, got '5'"),
        (["--seeds", "5:5"], "argument --seeds: no seed is in 5:5: the last one is left out"),
        (["--seeds=-1:5"], "argument --seeds: no seed is in -1:5"),
        (["--nodes", "x"], "argument --nodes: expected W,P,D, three whole numbers of at least 0, got 'x'"),
        (["--nodes", "1,2"], "argument --nodes: expected W,P,D"),
        (["--nodes", "1,2,-3"], "argument --nodes: expected W,P,D"),
        (["--check-every", "0"], "argument --check-every: expected at least 1, got 0"),
        (["--schedule", "FILE", "--seeds", "1:2"], "not allowed with argument --schedule"),
        (["--schedule", "FILE", "--profile", "all"], "--profile and --nodes are for --seeds"),
        (["--schedule", "FILE", "--nodes", "1,1,1"], "--profile and --nodes are for --seeds"),
    ],
)
def test_schedules(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schedule.json"
    draw_plan(0, "quick").save(file)
    words = [str(file) if word == "FILE" else word for word in words]
    with pytest.raises(SystemExit) as end:
        schedules.parse(words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "nosuch"], "--only: no defect has 'nosuch' in its name"),
        (["--seeds", "0"], "argument --seeds: expected at least 1, got 0"),
        (["--jobs", "0"], "argument --jobs: expected at least 1, got 0"),
    ],
)
def test_defects(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        find_defects.main(words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_torture(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        torture.parse(["--seeds", "0"])
    assert "argument --seeds: expected at least 1, got 0" in capsys.readouterr().err
