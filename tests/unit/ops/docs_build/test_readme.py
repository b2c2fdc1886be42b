"""The README's table of commands against the command line: every option in it is there, and `serve` has no other."""

import re
from pathlib import Path

import pytest

from kvferry.ops.cli.main import main

README = (Path(__file__).parents[4] / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `kvferry ([a-z]+(?: (?:engine|serve|perplexity))?)(.*)$", README, flags=re.MULTILINE)
OPTION = re.compile(r"--[a-z][a-z-]*")


def options(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return set(OPTION.findall(capsys.readouterr().out))


@pytest.mark.parametrize(("command", "row"), ROWS, ids=[command for command, _ in ROWS])
def test_options_of_the_table_are_there(command: str, row: str, capsys: pytest.CaptureFixture[str]):
    named = set(OPTION.findall(row))
    assert named <= options(command, capsys)


def test_the_row_of_serve_is_complete(capsys: pytest.CaptureFixture[str]):
    (row,) = [row for command, row in ROWS if command == "serve"]
    assert options("serve", capsys) - set(OPTION.findall(row)) == {"--help"}


def test_the_table_has_the_commands():
    assert {command.split()[0] for command, _ in ROWS} == {
        "serve", "router", "infer", "demo", "bench", "keys", "doctor",
    }  # fmt: skip
