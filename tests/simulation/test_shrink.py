"""A failing schedule becomes a short one that fails in the same way, and says so when it is read from its file."""

import re

import pytest
from msgspec.structs import replace

from tests.simulation.__main__ import main
from tests.simulation.defects import DEFECTS
from tests.simulation.draw import draw_plan
from tests.simulation.plan import Ask, Plan
from tests.simulation.shrink import Shrinker, shrink, tell
from tests.simulation.trial import Failure, try_plan

DEFECT = next(defect for defect in DEFECTS if defect.name == "a gap before new tokens is skipped")


def test_a_defect_is_shown_by_a_few_deeds():
    with DEFECT.applied():
        plan, failure = next(
            (plan, failure)
            for plan in (draw_plan(seed, DEFECT.profile) for seed in range(50))
            if (failure := try_plan(plan)) is not None
        )
        short, how = shrink(plan, failure)
        assert len(plan.deeds) > 6
        assert len(short.deeds) <= 3, "\n".join(tell(short))
        assert any(isinstance(deed, Ask) for deed in short.deeds)
        assert how.kind == failure.kind
        assert try_plan(short) == how, "it fails like that each time"
    assert try_plan(short) is None, "the defect alone is to blame"


def test_a_file_gives_the_same_schedule_again(tmp_path):
    for seed in range(5):
        plan = draw_plan(seed, "all")
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan


def test_the_commands_that_are_printed_replay_the_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(arguments: str):
        assert main(arguments.split()) == 1
        return capsys.readouterr().out

    with DEFECT.applied():
        first = run(f"--profile {DEFECT.profile} --seeds 0:50")
        whole, short = re.findall(r"^replay: python -m tests.simulation (.*)$", first, re.MULTILINE)
        found = re.findall(r"at [\d.]+ s: (Violation: .*)$", first, re.MULTILINE)
        assert len(found) == 2
        assert found[0] in run(whole)
        assert found[1] in run(short)


def fails_with(*needed: int):
    """Schedules that have requests with all these numbers fail."""

    def fails(plan: Plan) -> Failure | None:
        numbers = {deed.number for deed in plan.deeds if isinstance(deed, Ask)}
        return Failure(f"Violation: {len(plan.deeds)} deeds", 0.0, "") if numbers.issuperset(needed) else None

    return fails


@pytest.mark.parametrize("needed", [(), (2,), (0, 7), (1, 4, 6)])
def test_exactly_what_is_needed_stays(needed):
    plan = draw_plan(1, "overload")
    assert len(plan.deeds) > 8
    shrinker = Shrinker(plan, Failure("Violation: 1 deeds", 0.0, ""), fails_with(*needed))
    short = shrinker.run()
    assert sorted(deed.number for deed in short.deeds if isinstance(deed, Ask)) == sorted(needed)
    assert len(short.deeds) == len(needed)
    assert shrinker.num_runs < 100


def test_another_kind_of_failure_is_not_followed():
    plan = draw_plan(1, "overload")

    def fails(tried: Plan) -> Failure | None:
        return Failure("KeyError: 7" if len(tried.deeds) < len(plan.deeds) else "Violation: 7", 0.0, "")

    assert len(Shrinker(plan, Failure("Violation: 8", 0.0, ""), fails).run().deeds) == len(plan.deeds)


def test_it_stops_in_time():
    plan = draw_plan(1, "overload")
    shrinker = Shrinker(plan, Failure("Violation: 1 deeds", 0.0, ""), fails_with(3), max_runs=5)
    shrinker.run()
    assert shrinker.num_runs == 5
    assert shrinker.plan != replace(plan, deeds=())
