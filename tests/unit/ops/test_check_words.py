"""The check for banned words: rules, allowed paths, phrases across a line break, and the exit code."""

import subprocess
from pathlib import Path

import pytest

from kvferry.ops.check_words import Words, findings, main, read_words, tracked_files

TABLE = """
[banned]
"told|tells?" = "reports"
"at once" = "immediately"
"legs?" = "role"
"ferr(y|ies)" = "KV transfer"

[allowed]
"old/*" = ["*"]
"new.md" = ["legs?"]
"""


@pytest.fixture
def words(tmp_path: Path) -> Words:
    file = tmp_path / "words.toml"
    file.write_text(TABLE)
    return read_words(file)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It tells us.", [(1, "tells")]),
        ("TOLD\nnothing\nTold", [(1, "TOLD"), (3, "Told")]),
        ("is_told(), tell_all = 1", [(1, "told"), (1, "tell")]),
        ("retold, intellect, legal, elegant", []),
        ("kvferry, KVFERRY_CACHE", []),
        ("a ferry of kvferry", [(1, "ferry")]),
        ("at once", [(1, "at once")]),
        ("def at_once(): ...", [(1, "at_once")]),
        ("ends at\nonce", [(1, "at once")]),
        ("    # ends at\n    # once", [(1, "at # once")]),
        ("ends at\n\nonce", []),
        ("at last, once", []),
    ],
)
def test_findings_are_whole_words(words: Words, text: str, found: list[tuple[int, str]]) -> None:
    assert [(line, match) for line, match, _ in findings(text, words.rules)] == found


def test_a_finding_has_the_rule_that_names_the_replacement(words: Words) -> None:
    ((_, _, rule),) = findings("one leg", words.rules)
    assert rule.instead == "role"


def test_allowed_paths_have_fewer_rules(words: Words) -> None:
    patterns = [rule.pattern for rule in words.rules]
    assert [rule.pattern for rule in words.rules_for("a/b.py")] == patterns
    assert words.rules_for("old/b.py") == ()
    assert [rule.pattern for rule in words.rules_for("new.md")] == [name for name in patterns if name != "legs?"]


def test_an_allowed_pattern_must_be_a_banned_one(tmp_path: Path) -> None:
    file = tmp_path / "words.toml"
    file.write_text('[banned]\n"a" = "b"\n\n[allowed]\n"x" = ["a", "c"]\n')
    with pytest.raises(ValueError, match="allowed for x, but not banned: c"):
        read_words(file)


def test_the_table_of_the_project_is_valid() -> None:
    assert {"told|tells?", "nobody|somebody|anybody"} <= {rule.pattern for rule in read_words().rules}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a clean file, one with a banned word, a link to it, a picture, and an untracked file."""
    root = tmp_path / "repository"
    (root / "a").mkdir(parents=True)
    (root / "clean.md").write_text("It reports.\n")
    (root / "a" / "wrong.md").write_text("fine\nIt told us.\n")
    (root / "link.md").symlink_to("a/wrong.md")
    (root / "picture.png").write_bytes(b"\x89PNG\xff told")
    subprocess.run(("git", "init", "-q", str(root)), check=True)
    subprocess.run(("git", "-C", str(root), "add", "."), check=True)
    (root / "untracked.md").write_text("told\n")
    monkeypatch.chdir(root)
    return root


def test_only_regular_tracked_files_are_read(repository: Path) -> None:
    assert sorted(tracked_files(repository)) == ["a/wrong.md", "clean.md", "picture.png"]


@pytest.mark.parametrize(
    ("paths", "code"), [([], 1), (["a"], 1), (["a/wrong.md", "clean.md"], 1), (["clean.md"], 0), (["b"], 0)]
)
@pytest.mark.usefixtures("repository")
def test_findings_are_printed_and_set_the_exit_code(
    paths: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(paths) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines == (["a/wrong.md:2: 'told'; write: reported, says, sends"] if code else [])


def test_a_source_tree_without_git_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.md").write_text("told\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert main([]) == 0
    assert "not in a git repository" in capsys.readouterr().err
