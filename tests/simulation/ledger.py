"""The state of a torture: seeds done, with which code, and what happened in them; also its report. Plain data.

The file is replaced as a whole: a torture that is killed loses its last seconds and nothing else.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.support.files import write_whole

ROOT = Path(__file__).parents[2]
SOURCES = ("common", "decode_node", "ops", "prefill_node", "router", "tests/simulation")


class Failed(msgspec.Struct, frozen=True):
    """A seed that failed."""

    seed: int
    profile: str
    kind: str
    text: str

    @property
    def replay(self) -> str:
        """The command that runs it again."""
        return f"python -m tests.simulation --seeds {self.seed}:{self.seed + 1} --profile {self.profile} --trace"


class Tally(msgspec.Struct):
    """Sums over schedules."""

    cpu_s: float = 0.0
    tables: dict[str, dict[str, int]] = {}
    """Title -> what -> count."""
    failed: list[Failed] = []

    def add(self, other: "Tally") -> None:
        self.cpu_s += other.cpu_s
        self.failed += other.failed
        for title, counts in other.tables.items():
            self.count(title, counts)

    def count(self, title: str, counts: dict[str, int]) -> None:
        """Add counts to a table."""
        table = self.tables.setdefault(title, {})
        for what, count in counts.items():
            table[what] = table.get(what, 0) + count


class Ledger(msgspec.Struct):
    """All runs so far of one version of the code with one choice of profiles."""

    code: str
    profile: str
    next_seed: int = 0
    """All seeds below are done."""
    tally: Tally = msgspec.field(default_factory=Tally)

    @classmethod
    def open(cls, path: Path, profile: str, *, fresh: bool) -> "Ledger":
        """Continue the file's if it is of the same code, else begin a new one."""
        new = cls(code_version(), profile)
        try:
            old = new if fresh else msgspec.json.decode(path.read_bytes(), type=Ledger)
        except (FileNotFoundError, msgspec.DecodeError):
            return new
        return old if (old.code, old.profile) == (new.code, new.profile) else new

    def save(self, path: Path) -> None:
        write_whole(path, msgspec.json.encode(self))

    def report(self, command: str) -> str:
        """Return one page of Markdown: schedules, speed, faults, ends of requests, failures."""
        return "\n".join(self._lines(command)) + "\n"

    def _lines(self, command: str) -> Iterator[str]:
        failed, cpu_s = self.tally.failed, self.tally.cpu_s
        yield f"# Torture: {self.next_seed} schedules, {len(failed) or 'none'} of them failed\n"
        yield f"`{command}`, code {self.code}.\n"
        yield f"{cpu_s:.0f} s of CPU time, {60 * self.next_seed / max(cpu_s, 1e-3):.0f} schedules a minute of it.\n"
        for title, counts in self.tally.tables.items():
            yield from (f"| {title} | count |", "| --- | ---: |")
            for what, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
                yield f"| {what.strip()} | {count} |"
            yield ""
        for one in failed:
            yield f"- seed {one.seed} ({one.profile}): {one.text[:300]}\n  `{one.replay}`"


def code_version() -> str:
    """Return a digest of all sources that a schedule runs."""
    found = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]
