"""The pages and pictures that a trial and a soak leave behind."""

from pathlib import Path

from tests.chaos.client import End, Record
from tests.chaos.client_requests import ClientRequest
from tests.chaos.fault_injector import InjectedFault
from tests.chaos.faults import Fault, Kind
from tests.chaos.plot import plot_samples
from tests.chaos.report import write_report
from tests.chaos.sampler import Sample
from tests.chaos.soak_report import Grown, Run, State, page
from tests.chaos.trial import Plan, Result

MIB = 1 << 20
SAMPLES = [
    Sample(float(at), name, pid, pid * MIB, at) for at in range(4) for name, pid in (("worker", 50), ("router", 70))
]
ENDS = [(11.0, 12.0), (13.5, 15.0), (16.0, 19.0)]


def result(wrong: list[str]) -> Result:
    records = [
        Record(ClientRequest(0, 1, True), started, ended, End.COMPLETE, 200, 5000, [7, 8], [started + 0.5, ended])
        for started, ended in ENDS
    ]
    injected = [InjectedFault(Fault(0, 3.0, Kind.KILL, "decode-0"), 13.0, [9])]
    plan = Plan(5, 3, 1, 3.0, 1, 1.0, 60.0)
    return Result(plan, "a proxy", 10.0, 20.0, records, injected, SAMPLES, SAMPLES[:2], SAMPLES[-2:], wrong)


def test_the_page_of_a_trial_counts_and_has_a_picture(tmp_path: Path) -> None:
    text = write_report(result([]), tmp_path / "new", "the command").read_text()
    assert text.startswith("# Chaos: nothing wrong\n\n`the command`, seed 5; links: a proxy.\n")
    assert "3 requests of 1 clients in 10 s (0.3/s), \n6 tokens, 1 faults.\n" in text
    assert "| kill node | 1 |" in text
    # The first answer of a request begun after the fault: begun 0.5 s later, complete 1.5 s after that.
    assert "| kills | next request served | 1 | 2.00 | 2.00 | 2.00 |" in text
    assert "| worker | 50 | 50 | 50 | 0 | 3 | 3 |" in text
    assert text.endswith("\n![over time](chaos.png)\n")
    assert (tmp_path / "new" / "chaos.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_of_a_trial_says_what_is_wrong(tmp_path: Path) -> None:
    text = write_report(result([f"thing {number}" for number in range(25)]), tmp_path, "x").read_text()
    assert text.startswith("# Chaos: 25 things are wrong\n")
    assert "\n- thing 19\n- and 5 more\n" in text


def test_the_page_of_a_soak_adds_its_runs_and_judges_each(tmp_path: Path) -> None:
    flat, grown = Grown("worker", 5, 50 * MIB, 51 * MIB, 9, 9), Grown("router", 7, 50 * MIB, 80 * MIB, 9, 9)
    clean = State([Run(600, 6.0, {"complete": 600}, [], [flat]), Run(400, 4.0, {"complete": 400}, [], [flat])])
    assert page(clean, "x", "soak.png").startswith("# Soak: 1000 requests, nothing wrong\n")
    assert clean.is_clean
    for run in (Run(1, 1.0, {"complete": 1}, [], [grown]), Run(1, 1.0, {"lost": 1}, ["lost: x"], [flat])):
        assert not (state := State([*clean.runs, run])).is_clean
        assert page(state, "x", "soak.png").startswith("# Soak: 1001 requests, not clean\n")
    short = State([Run(1, 1.0, {"complete": 1}, [], [])])
    assert not short.is_clean
    assert "Too short to judge whether memory is flat." in page(short, "x", "soak.png")
    plot_samples(SAMPLES, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
