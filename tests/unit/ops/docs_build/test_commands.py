"""Commands that pages show: every `kvferry` option and `make` target exists, and the table of commands is complete."""

import re
from pathlib import Path

import pytest

from kvferry.ops.cli.main import main

ROOT = Path(__file__).parents[4]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
OPERATIONS = ROOT / "ops" / "docs" / "operations.md"
SUBCOMMANDS = r"(?: (?:engine|serve|perplexity|new|public))?"
ROWS = re.findall(
    rf"^\| `kvferry ([a-z]+{SUBCOMMANDS})(.*)$", OPERATIONS.read_text(encoding="utf-8"), flags=re.MULTILINE
)
OPTION = re.compile(r"--[a-z][a-z-]*")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
WITH_COMMANDS = sorted({README, CONTRIBUTING, *ROOT.glob("ops/docs/*.md")})


def options(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0, f"there is no command kvferry {command}"
    return set(OPTION.findall(capsys.readouterr().out))


@pytest.mark.parametrize(("command", "row"), ROWS, ids=[command for command, _ in ROWS])
def test_options_of_the_table_exist(command: str, row: str, capsys: pytest.CaptureFixture[str]):
    assert set(OPTION.findall(row)) <= options(command, capsys)


def test_the_row_of_serve_is_complete(capsys: pytest.CaptureFixture[str]):
    (row,) = [row for command, row in ROWS if command == "serve"]
    assert options("serve", capsys) - set(OPTION.findall(row)) == {"--help"}


def test_the_table_has_every_command():
    assert {command.split()[0] for command, _ in ROWS} == {
        "serve", "router", "infer", "demo", "bench", "keys", "doctor",
    }  # fmt: skip


def examples(page: Path) -> list[tuple[str, str]]:
    """`kvferry` command lines in code blocks and backquotes: command, then its options as written."""
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"^(?:\$ )?kvferry (.+)$", text, flags=re.MULTILINE) + re.findall(r"`kvferry ([^`|\\]+)`", text)
    parsed = (re.match(rf"([a-z]+{SUBCOMMANDS})(.*)", line) for line in lines)
    return [(found[1], found[2]) for found in parsed if found is not None]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_examples_use_commands_and_options_that_exist(page: Path, capsys: pytest.CaptureFixture[str]):
    for command, rest in examples(page):
        assert set(OPTION.findall(rest)) <= options(command, capsys), f"kvferry {command}{rest}"


def test_the_readme_has_examples():
    assert {"infer", "bench serve", "bench engine"} <= {command for command, _ in examples(README)}


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_make_targets_exist(page: Path):
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {first or second for first, second in named} <= TARGETS
