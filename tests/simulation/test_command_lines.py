"""The commands of the simulation refuse ranges, names and numbers that would run nothing."""

from pathlib import Path

import pytest

from tests.simulation import __main__ as schedules
from tests.simulation import find_defects, torture
from tests.simulation.draw import draw_schedule

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--seeds", "5"], "argument --seeds: expected A:B such as 0:100, got '5'"),
        (["--seeds", "5:5"], "argument --seeds: 5:5 is an empty range: B is excluded"),
        (["--seeds=-1:5"], "argument --seeds: -1:5 is an empty range"),
        (["--nodes", "x"], "argument --nodes: expected W,P,D, three whole numbers of at least 0, got 'x'"),
        (["--nodes", "1,2"], "argument --nodes: expected W,P,D"),
        (["--nodes", "1,2,-3"], "argument --nodes: expected W,P,D"),
        (["--check-every", "0"], "argument --check-every: expected at least 1, got 0"),
        (["--schedule", "FILE", "--seeds", "1:2"], "not allowed with argument --schedule"),
        (["--schedule", "FILE", "--profile", "all"], "--profile and --nodes are for --seeds"),
        (["--schedule", "FILE", "--nodes", "1,1,1"], "--profile and --nodes are for --seeds"),
    ],
)
def test_schedules_refuses(arguments: list[str], error: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "schedule.json"
    draw_schedule(0, "quick").save(file)
    arguments = [str(file) if argument == "FILE" else argument for argument in arguments]
    with pytest.raises(SystemExit) as end:
        schedules.parse(arguments)
    assert end.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--only", "nosuch"], "--only: no defect has 'nosuch' in its name"),
        (["--seeds", "0"], "argument --seeds: expected at least 1, got 0"),
        (["--jobs", "0"], "argument --jobs: expected at least 1, got 0"),
    ],
)
def test_find_defects_refuses(arguments: list[str], error: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        find_defects.main(arguments)
    assert end.value.code == 2
    assert error in capsys.readouterr().err


def test_torture_refuses_zero_seeds(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        torture.parse(["--seeds", "0"])
    assert "argument --seeds: expected at least 1, got 0" in capsys.readouterr().err
