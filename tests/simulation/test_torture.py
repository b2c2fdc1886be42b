"""The torture resumes, runs each seed once, and reports what failed."""

import signal
import subprocess
import sys

import msgspec
import pytest

from tests.simulation import torture
from tests.simulation.defects import DEFECTS
from tests.simulation.ledger import ROOT, Failed, Ledger, Tally, code_version
from tests.simulation.torture import main, run_seeds, shrink_some
from tests.support.serve import wait_until

DEFECT = next(defect for defect in DEFECTS if defect.name == "reports of other attempts count")


def ledger_of(path) -> Ledger:
    return msgspec.json.decode(path.read_bytes(), type=Ledger)


def test_another_version_of_the_code_begins_a_new_count(tmp_path):
    path = tmp_path / "all.json"
    old = Ledger(code_version(), "all", 10)
    old.save(path)
    assert Ledger.open(path, "all", fresh=False) == old
    new = Ledger(old.code, "all")
    assert Ledger.open(path, "all", fresh=True) == new
    assert Ledger.open(path, "each", fresh=False) == Ledger(old.code, "each")
    Ledger("another", "all", 10).save(path)
    assert Ledger.open(path, "all", fresh=False) == new
    path.write_text("{")
    assert Ledger.open(path, "all", fresh=False) == new


def test_a_failed_seed_is_reported_and_the_first_of_its_kind_shrunk(tmp_path, capsys):
    with DEFECT.applied():
        tally = run_seeds("all", 0, 10)
        shrink_some([*tally.failed, *tally.failed], tmp_path)
    assert 0 < len(tally.failed) < 10
    kinds = {failed.kind: failed for failed in reversed(tally.failed)}
    assert capsys.readouterr().out.count("shrunk from") == len(kinds) == len(list(tmp_path.iterdir()))
    report = Ledger("c", "all", 10, tally=tally).report("torture")
    assert f"10 schedules, {len(tally.failed)} of them failed" in report
    assert tally.failed[0].replay in report
    assert "| restart at the same address |" in report


def test_it_resumes(tmp_path, capsys):
    out = ["--out", str(tmp_path), "--jobs", "1", "--profile", "quick"]
    assert main(["--seeds", "10", *out]) == 0
    assert main(["--seeds", "15", *out]) == 0
    ledger = ledger_of(tmp_path / "quick.json")
    assert (ledger.next_seed, ledger.tally.tables["profile"]) == (15, {"quick": 15})
    printed = capsys.readouterr().out
    assert "continues at seed 10" in printed
    assert "# Torture: 15 schedules, none of them failed" in printed
    assert (tmp_path / "quick.md").read_text() in printed


@pytest.mark.parametrize(("num_failed", "next_seed"), [(1, 20), (torture.MOST_FAILED, 10)])
def test_failures_of_earlier_runs_count_and_too_many_end_it(num_failed, next_seed, tmp_path, monkeypatch):
    monkeypatch.setattr(torture, "shrink_some", lambda failed, out: None)
    failed = [Failed(seed, "none", "Violation", "Violation") for seed in range(num_failed)]
    Ledger(code_version(), "none", 10, tally=Tally(failed=failed)).save(tmp_path / "none.json")
    assert main(["--seeds", "20", "--profile", "none", "--jobs", "1", "--out", str(tmp_path)]) == 1
    assert ledger_of(tmp_path / "none.json").next_seed == next_seed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_schedules_on_all_cores(tmp_path):
    assert main(["--seeds", "2000", "--out", str(tmp_path)]) == 0


@pytest.mark.slow
def test_after_ctrl_c_the_same_command_continues(tmp_path):
    command = [sys.executable, "-m", "tests.simulation.torture", "--jobs", "1", "--profile", "none"]
    command += ["--out", str(tmp_path)]
    path = tmp_path / "none.json"
    with subprocess.Popen([*command, "--minutes", "60"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        wait_until(path.exists, "the state is written")
        running.send_signal(signal.SIGINT)
        printed, _ = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "the same command continues" in printed
    done = ledger_of(path).next_seed
    assert done > 0
    again = subprocess.run([*command, "--seeds", str(done + 5)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"continues at seed {done}" in again.stdout
    assert ledger_of(path).next_seed == done + 5
