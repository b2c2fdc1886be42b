"""Each seeded defect is noticed, and is gone once it is removed."""

from dataclasses import replace

import pytest

from kvferry.common.cluster.clients import Client
from tests.simulation.defects import DEFECTS, Defect, Seams
from tests.simulation.draw import draw_schedule
from tests.simulation.find_defects import PAGE, Outcome, find, main, page
from tests.simulation.profiles import PROFILES
from tests.simulation.trial import try_schedule

MORE_SEEDS = 20
"""A change of the cores may move the first seed that notices a defect a little."""


def rows() -> dict[str, tuple[str, str, int]]:
    """Defect -> promise, profile, seed, as ops/docs/defects.md has them."""
    lines = [line.split("|")[1:5] for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines[2:]]
    return {name: (promise, profile, int(seed)) for promise, name, profile, seed in cells}


ROWS = rows()


def test_names_are_unique_and_the_page_lists_every_defect():
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    assert {defect.profile for defect in DEFECTS} <= set(PROFILES)
    listed = {name: (promise, profile) for name, (promise, profile, _) in ROWS.items()}
    assert listed == {defect.name: (defect.promise, defect.profile) for defect in DEFECTS}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name.replace(" ", "-"))
def test_the_simulation_notices_the_defect_and_nothing_without_it(defect: Defect):
    seed = ROWS[defect.name][2]
    outcome = find(defect, range(seed, seed + MORE_SEEDS))
    assert outcome.seed is not None, "run `python -m tests.simulation.find_defects --table`"
    assert try_schedule(draw_schedule(outcome.seed, defect.profile)) is None


def test_a_private_or_missing_method_cannot_be_wrapped():
    with Seams() as seams:
        with pytest.raises(ValueError, match="_wants is private"):
            seams.returns(Client, "_wants", True)
        with pytest.raises(KeyError):
            seams.returns(Client, "wanted_by", True)


def test_a_defect_that_does_not_fit_is_an_error():
    unfit = replace(DEFECTS[0], apply=lambda seams: seams.wrap(Client, "wants", lambda _: lambda: True))
    with pytest.raises(TypeError, match=unfit.name):
        find(unfit, range(1))


def test_a_missed_defect_fails_the_command_and_leaves_the_page(capsys: pytest.CaptureFixture[str]):
    before = PAGE.read_bytes()
    assert main(["--only", "earlier reservation", "--seeds", "1", "--table", "--jobs", "1"]) == 1
    assert "NOT NOTICED" in capsys.readouterr().out
    assert PAGE.read_bytes() == before


def test_a_row_is_one_line_of_the_table():
    text = page([Outcome(DEFECTS[0], 3, "Violation: a | b\nc")])
    assert text.endswith("| 3 | Violation: a \\| b c |\n")
