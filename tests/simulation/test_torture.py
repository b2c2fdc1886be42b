"""The torture goes on where it was stopped, counts each seed once, and tells what failed."""

import signal
import subprocess
import sys

import msgspec
import pytest

from tests.simulation import torture
from tests.simulation.defects import DEFECTS
from tests.simulation.ledger import ROOT, Failed, Ledger, Tally, code_version, open_ledger
from tests.simulation.torture import do_range, main, shrink_some
from tests.simulation.torture_page import page
from tests.support.serve import wait_until

DEFECT = next(defect for defect in DEFECTS if defect.name == "reports of other attempts count")


def ledger_of(path) -> Ledger:
    return msgspec.json.decode(path.read_bytes(), type=Ledger)


def test_ranges_that_touch_become_one_and_what_is_left_is_what_is_not_done():
    ledger = Ledger("c", "all")
    for first, end in ((20, 30), (0, 10), (40, 50), (10, 15)):
        ledger.note(first, end, Tally(end - first))
    assert ledger.done == [(0, 15), (20, 30), (40, 50)]
    assert ledger.tally.schedules == 35
    assert list(ledger.left(60, 10)) == [(15, 20), (30, 40), (50, 60)]
    assert list(ledger.left(25, 4)) == [(15, 19), (19, 20)]
    endless = ledger.left(None, 10)
    assert [next(endless) for _ in range(5)] == [(15, 20), (30, 40), (50, 60), (60, 70), (70, 80)]


def test_another_version_of_the_code_begins_anew_and_says_so(tmp_path):
    path = tmp_path / "all.json"
    old = Ledger("one", "all")
    old.note(0, 10, Tally(10))
    old.save(path)
    same = open_ledger(path, "one", "all", fresh=False)
    assert same.ledger == old
    assert "goes on after 10" in same.story
    for opened in (
        open_ledger(path, "two", "all", fresh=False),
        open_ledger(path, "one", "each", fresh=False),
        open_ledger(path, "one", "all", fresh=True),
    ):
        assert opened.ledger.done == []
        assert "a new count" in opened.story
    path.write_text("{")
    assert "cannot be read" in open_ledger(path, "one", "all", fresh=False).story


def test_the_version_is_the_commit_and_what_was_changed_since():
    version = code_version()
    assert version == code_version()
    assert len(version.partition("+")[0]) >= 12


def test_a_failed_seed_is_kept_and_the_others_go_on():
    with DEFECT.applied():
        first, end, tally = do_range("all", 0, 10)
    assert (first, end, tally.schedules) == (0, 10, 10)
    assert 0 < len(tally.failed) < 10
    ledger = Ledger("c", "all")
    ledger.note(first, end, tally)
    text = page(ledger, "torture")
    assert f"{len(tally.failed)} of them failed" in text
    assert tally.failed[0].replay in text
    assert "| restart at the same address |" in text
    assert not any(line != line.rstrip() for line in text.splitlines()), "a sentence goes on in its line"


def test_one_failure_of_each_kind_is_shrunk(tmp_path, capsys):
    with DEFECT.applied():
        _, _, tally = do_range("all", 0, 10)
        shrink_some([*tally.failed, *tally.failed], tmp_path)
    told = capsys.readouterr().out
    kinds = {failed.kind: failed for failed in reversed(tally.failed)}
    assert told.count("shrunk from") == len(kinds) == len(list(tmp_path.iterdir()))
    for failed in kinds.values():
        assert f"--schedule {tmp_path}/all-{failed.seed}.json" in told


def test_it_goes_on_where_it_was(tmp_path, capsys):
    out = ["--out", str(tmp_path), "--jobs", "1", "--profile", "quick"]
    assert main(["--seeds", "10", *out]) == 0
    assert ledger_of(tmp_path / "quick.json").done == [(0, 10)]
    assert main(["--seeds", "15", *out]) == 0
    ledger = ledger_of(tmp_path / "quick.json")
    assert (ledger.done, ledger.tally.schedules) == ([(0, 15)], 15)
    told = capsys.readouterr().out
    assert "goes on after 10 schedules" in told
    assert "# Torture: 15 schedules, none of them failed" in told
    assert (tmp_path / "quick.md").read_text() in told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_schedules_on_all_cores(tmp_path):
    assert main(["--seeds", "2000", "--out", str(tmp_path)]) == 0


def test_failures_of_earlier_runs_are_failures(tmp_path, capsys, monkeypatch):
    ledger = Ledger(code_version(), "quick")
    ledger.note(0, 10, Tally(10, failed=[Failed(3, "quick", "Violation", "Violation: of an earlier run")]))
    ledger.save(tmp_path / "quick.json")
    monkeypatch.setattr(torture, "shrink_some", lambda failed, out: None)
    assert main(["--seeds", "10", "--profile", "quick", "--out", str(tmp_path)]) == 1
    assert "--seeds 3:4 --profile quick" in capsys.readouterr().out


def test_after_very_many_failures_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(torture, "shrink_some", lambda failed, out: None)
    failed = [Failed(seed, "none", "Violation", "Violation") for seed in range(torture.MOST_FAILED)]
    ledger = Ledger(code_version(), "none", tally=Tally(failed=failed))
    ledger.save(tmp_path / "none.json")
    assert main(["--seeds", "10", "--profile", "none", "--out", str(tmp_path)]) == 1
    assert ledger_of(tmp_path / "none.json").done == []


@pytest.mark.slow
def test_ctrl_c_leaves_it_so_that_it_can_go_on(tmp_path):
    command = [sys.executable, "-m", "tests.simulation.torture", "--jobs", "1", "--profile", "none"]
    command += ["--out", str(tmp_path)]
    running = subprocess.Popen([*command, "--minutes", "60"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    path = tmp_path / "none.json"
    with running:
        wait_until(path.exists, "the state is written")
        running.send_signal(signal.SIGINT)
        told, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "it goes on" in told
    done = ledger_of(path).tally.schedules
    assert done > 0
    assert ledger_of(path).done == [(0, done)]
    again = subprocess.run([*command, "--seeds", str(done + 5)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"goes on after {done} schedules" in again.stdout
    assert ledger_of(path).done == [(0, done + 5)]
