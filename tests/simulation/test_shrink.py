"""Shrinking yields a short schedule that fails in the same way, also after it is saved and loaded."""

import re

import pytest
from msgspec.structs import replace

from tests.simulation.__main__ import main
from tests.simulation.defects import DEFECTS
from tests.simulation.draw import draw_schedule
from tests.simulation.schedule import Ask, Schedule
from tests.simulation.shrink import Shrinker, describe, shrink
from tests.simulation.trial import Failure, try_schedule

DEFECT = next(defect for defect in DEFECTS if defect.name == "a gap before new tokens is skipped")


def test_a_defect_needs_few_events():
    with DEFECT.applied():
        schedule, failure = next(
            (schedule, failure)
            for schedule in (draw_schedule(seed, DEFECT.profile) for seed in range(50))
            if (failure := try_schedule(schedule)) is not None
        )
        short, how = shrink(schedule, failure)
        assert len(schedule.events) > 6
        assert len(short.events) <= 3, "\n".join(describe(short))
        assert any(isinstance(event, Ask) for event in short.events)
        assert how.kind == failure.kind
        assert try_schedule(short) == how, "the failure is reproducible"
    assert try_schedule(short) is None, "the schedule fails without the defect"


def test_a_loaded_schedule_equals_the_saved_one(tmp_path):
    for seed in range(5):
        schedule = draw_schedule(seed, "all")
        schedule.save(tmp_path / "schedule.json")
        assert Schedule.load(tmp_path / "schedule.json") == schedule


def test_printed_commands_replay_the_failure(tmp_path, monkeypatch, capsys):
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
    """Return a `fails` for which schedules with all these request numbers fail."""

    def fails(schedule: Schedule) -> Failure | None:
        numbers = {event.number for event in schedule.events if isinstance(event, Ask)}
        return Failure(f"Violation: {len(schedule.events)} events", 0.0, "") if numbers.issuperset(needed) else None

    return fails


@pytest.mark.parametrize("needed", [(), (2,), (0, 7), (1, 4, 6)])
def test_only_needed_events_remain(needed):
    schedule = draw_schedule(1, "overload")
    assert len(schedule.events) > 8
    shrinker = Shrinker(schedule, Failure("Violation: 1 events", 0.0, ""), fails_with(*needed))
    short = shrinker.run()
    assert sorted(event.number for event in short.events if isinstance(event, Ask)) == sorted(needed)
    assert len(short.events) == len(needed)
    assert shrinker.num_runs < 100


def test_another_kind_of_failure_is_not_followed():
    schedule = draw_schedule(1, "overload")

    def fails(tried: Schedule) -> Failure | None:
        return Failure("KeyError: 7" if len(tried.events) < len(schedule.events) else "Violation: 7", 0.0, "")

    assert len(Shrinker(schedule, Failure("Violation: 8", 0.0, ""), fails).run().events) == len(schedule.events)


def test_shrinking_stops_after_max_runs():
    schedule = draw_schedule(1, "overload")
    shrinker = Shrinker(schedule, Failure("Violation: 1 events", 0.0, ""), fails_with(3), max_runs=5)
    shrinker.run()
    assert shrinker.num_runs == 5
    assert shrinker.schedule != replace(schedule, events=())
