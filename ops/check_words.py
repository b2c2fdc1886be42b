"""Finds banned words (`check_words.toml`) in the repository: `python -m kvferry.ops.check_words [PATH ...]`.

Reads the text files that git tracks, prints one line for each finding, and exits with 1 if there are any. Changes
nothing.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

WORDS = Path(__file__).with_suffix(".toml")
_EVERY = "*"
_PRODUCT = re.compile(r"kvferry", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rule:
    """A banned pattern, and what to write instead."""

    pattern: str
    instead: str
    regex: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Words:
    """All rules, and the patterns that are allowed in the paths of each glob."""

    rules: tuple[Rule, ...]
    allowed: dict[str, frozenset[str]]

    def rules_for(self, path: str) -> tuple[Rule, ...]:
        """The rules for the file at `path`, relative to the top of the repository."""
        free = frozenset[str]().union(*(names for glob, names in self.allowed.items() if fnmatch(path, glob)))
        return () if _EVERY in free else tuple(rule for rule in self.rules if rule.pattern not in free)


def read_words(file: Path = WORDS) -> Words:
    """Read the table in `file`. Raises ValueError if an allowed pattern is not a banned one."""
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    banned: dict[str, str] = table["banned"]
    rules = tuple(Rule(pattern, instead, _compile(pattern)) for pattern, instead in banned.items())
    allowed = {glob: frozenset(names) for glob, names in table["allowed"].items()}
    for glob, names in allowed.items():
        if unknown := names - banned.keys() - {_EVERY}:
            raise ValueError(f"{file.name}: allowed for {glob}, but not banned: {', '.join(sorted(unknown))}")
    return Words(rules, allowed)


def findings(text: str, rules: Sequence[Rule]) -> Iterator[tuple[int, str, Rule]]:
    """Line number, matched text, and rule of each finding. A phrase may cross one line break."""
    readable = _PRODUCT.sub("product", text)
    for rule in rules:
        for match in rule.regex.finditer(readable):
            yield readable.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), rule


def tracked_files(root: Path) -> list[str]:
    """Paths below `root`, relative to it, of the regular files that git tracks."""
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=root, capture_output=True, text=True, check=True)
    paths = (path for path in listed.stdout.split("\0") if path)
    return [path for path in paths if (root / path).is_file() and not (root / path).is_symlink()]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; returns the exit code, 0 if there are none."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.ops.check_words", description=__doc__)
    parser.add_argument("paths", nargs="*", help="files or folders, relative to the current folder; default: all")
    args = parser.parse_args(argv)
    words, count = read_words(), 0
    wanted = tuple(str(Path(path)) for path in args.paths)
    try:
        files = tracked_files(Path.cwd())
    except (OSError, subprocess.CalledProcessError):
        sys.stderr.write("check_words: skipped, since the current folder is not in a git repository\n")
        return 0
    for path in files:
        if wanted and not any(path == prefix or path.startswith(f"{prefix}/") for prefix in wanted):
            continue
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        for line, match, rule in sorted(findings(text, words.rules_for(path)), key=lambda found: found[0]):
            sys.stdout.write(f"{path}:{line}: '{match}'; write: {rule.instead}\n")
            count += 1
    return 1 if count else 0


def _compile(pattern: str) -> re.Pattern[str]:
    """Match whole words, separated by spaces, an underscore, or one line break with a comment sign."""
    spaced = pattern.replace(" ", r"(?:[ _]|[ ]*\n[ #>*]*)")
    return re.compile(rf"(?<![a-zA-Z])(?:{spaced})(?![a-zA-Z])", re.IGNORECASE)


if __name__ == "__main__":
    sys.exit(main())
