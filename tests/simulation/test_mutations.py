"""The seeded defects: each is told of in the docs, fits where it is put, and is taken off again."""

from dataclasses import replace

import pytest

from tests.simulation.mutate import AT_MOST, PAGE, Outcome, first_catch, main
from tests.simulation.mutations import MUTATIONS
from tests.simulation.profiles import PROFILES

ROWS = [[cell.strip() for cell in line.split("|")[1:6]] for line in PAGE.read_text("utf-8").splitlines() if "|" in line]


def test_the_page_has_every_defect_and_no_other():
    """Not that the seeds are still the first ones: the command makes the page anew."""
    told = [(rule, name, profile) for rule, name, profile, *_ in ROWS[2:]]
    assert sorted(told) == sorted((m.rule, m.name, m.profile) for m in MUTATIONS)
    assert all(int(seed) < AT_MOST and noticed for _, _, _, seed, noticed in ROWS[2:])


def test_names_are_unique_and_rules_and_profiles_exist():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 50
    assert {mutation.profile for mutation in MUTATIONS} <= set(PROFILES)
    assert {int(mutation.rule) for mutation in MUTATIONS} <= set(range(1, 39))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_defect_is_there_while_it_is_applied_and_no_longer(mutation):
    before = mutation.owner.__dict__[mutation.attribute]
    with mutation.applied():
        assert mutation.owner.__dict__[mutation.attribute] is not before
    assert mutation.owner.__dict__[mutation.attribute] is before


def test_a_defect_that_does_not_fit_is_no_catch():
    easy = next(mutation for mutation in MUTATIONS if mutation.name == "transfer slots are not given")
    seed, told = first_catch(easy, 3)
    assert seed == 0
    assert told.startswith("Violation")
    with pytest.raises(TypeError, match="transfer slots are not given"):
        first_catch(replace(easy, make=lambda _: list), 1)


def test_a_missed_defect_is_told_and_leaves_the_page_alone(capsys):
    before = PAGE.read_bytes()
    assert main(["--only", "earlier Reserve", "--seeds", "1", "--table", "--jobs", "1"]) == 1
    assert "NOT CAUGHT" in capsys.readouterr().out
    assert PAGE.read_bytes() == before


def test_a_row_is_one_line_of_a_table():
    row = Outcome(MUTATIONS[0], 3, "Violation: a | b\nc").row
    assert "\n" not in row
    assert "a \\| b c" in row
