"""What a torture has done so far: which seeds, with which code, what came of them. Plain data in one small file.

The file is replaced as a whole: whoever is stopped loses the last seconds and nothing else.
"""

import hashlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.support.files import write_whole

ROOT = Path(__file__).parents[2]
Counts = dict[str, int]


class Failed(msgspec.Struct, frozen=True):
    """A seed that failed."""

    seed: int
    profile: str
    kind: str
    text: str

    @property
    def replay(self) -> str:
        """What to type."""
        return f"python -m tests.simulation --seeds {self.seed}:{self.seed + 1} --profile {self.profile} --trace"


class Tally(msgspec.Struct):
    """Sums over schedules; may be added up in any order."""

    schedules: int = 0
    cpu_s: float = 0.0
    profiles: Counts = {}
    faults: Counts = {}
    ends: Counts = {}
    messages: Counts = {}
    failed: list[Failed] = []

    def add(self, other: "Tally") -> None:
        """Count those as well."""
        self.schedules += other.schedules
        self.cpu_s += other.cpu_s
        self.failed += other.failed
        for name in ("profiles", "faults", "ends", "messages"):
            mine: Counts = getattr(self, name)
            for what, count in getattr(other, name).items():
                mine[what] = mine.get(what, 0) + count


class Ledger(msgspec.Struct):
    """All runs so far of one version of the code with one choice of profiles."""

    code: str
    profile: str
    done: list[tuple[int, int]] = []
    """Ranges of seeds, half-open, in order, apart from one another."""
    wall_s: float = 0.0
    tally: Tally = msgspec.field(default_factory=Tally)

    def note(self, first: int, end: int, tally: Tally) -> None:
        """These seeds are done."""
        self.tally.add(tally)
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.done, (first, end)]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        self.done = merged

    def left(self, until: int | None, size: int) -> Iterator[tuple[int, int]]:
        """What is not done yet, in ranges of at most `size`; without `until` it has no end."""
        at = 0
        for start, stop in self.done:
            yield from _pieces(at, start if until is None else min(start, until), size)
            at = stop
        yield from _pieces(at, until, size)

    def save(self, path: Path) -> None:
        """Write it to its file."""
        write_whole(path, msgspec.json.encode(self))


def _pieces(first: int, until: int | None, size: int) -> Iterator[tuple[int, int]]:
    while until is None or first < until:
        end = first + size if until is None else min(first + size, until)
        yield first, end
        first = end


@dataclass(frozen=True, slots=True)
class Opened:
    """A ledger, and how it came to be: one line for whoever started the torture."""

    ledger: Ledger
    story: str


def open_ledger(path: Path, code: str, profile: str, *, fresh: bool) -> Opened:
    """Go on with the file's, if it is of the same code; else begin a new count."""
    new = Ledger(code, profile)
    if fresh or not path.exists():
        return Opened(new, f"a new count, at {code}")
    try:
        old = msgspec.json.decode(path.read_bytes(), type=Ledger)
    except msgspec.DecodeError as error:
        return Opened(new, f"{path} cannot be read ({error}): a new count, at {code}")
    if (old.code, old.profile) != (code, profile):
        return Opened(new, f"{old.tally.schedules} schedules were of {old.code}: a new count, at {code}")
    return Opened(old, f"goes on after {old.tally.schedules} schedules, at {code}")


def code_version() -> str:
    """The commit, and what differs from it in the working tree; without git a digest of all sources."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD").strip()
        changes = _git("diff", "HEAD") + _git("ls-files", "--others", "--exclude-standard")
    except (OSError, subprocess.CalledProcessError):
        found = hashlib.sha256()
        for path in sorted(ROOT.glob("*/**/*.py")):
            if not path.relative_to(ROOT).parts[0].startswith((".", "build")):
                found.update(path.read_bytes())
        return f"sources {found.hexdigest()[:12]}"
    return f"{commit}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else commit


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
