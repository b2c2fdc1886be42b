"""One page about a torture: schedules, speed, what befell them, how requests ended, what failed. Text only."""

from collections.abc import Iterable, Iterator

from tests.simulation.ledger import Counts, Ledger

_FAILED_SHOWN = 20


def page(ledger: Ledger, command: str) -> str:
    """Markdown."""
    return "\n".join(_lines(ledger, command)) + "\n"


def _lines(ledger: Ledger, command: str) -> Iterator[str]:
    tally = ledger.tally
    wrong = f"{len(tally.failed)} of them failed" if tally.failed else "none of them failed"
    yield f"# Torture: {tally.schedules} schedules, {wrong}\n"
    yield f"`{command}`, code {ledger.code}, seeds {', '.join(f'{first}:{end}' for first, end in ledger.done)}.\n"
    wall = f"{ledger.wall_s:.0f} s, {_a_minute(tally.schedules, ledger.wall_s)} a minute"
    yield f"{wall}; {tally.cpu_s:.0f} s of CPU time, {_a_minute(tally.schedules, tally.cpu_s)} a minute of it.\n"
    quiet = {what: count for what, count in tally.ends.items() if what.startswith("quiet")}
    ends = {what: count for what, count in tally.ends.items() if what not in quiet}
    yield from _table("profile", tally.profiles)
    yield from _table("what befell them", tally.faults)
    yield from _table("how requests ended", ends)
    yield from _table("what nodes said of it", tally.messages)
    yield from _table("nothing is held any more", quiet)
    for failed in tally.failed[:_FAILED_SHOWN]:
        yield f"- seed {failed.seed} ({failed.profile}): {failed.text[:300]}\n  `{failed.replay}`"
    if len(tally.failed) > _FAILED_SHOWN:
        yield f"- and {len(tally.failed) - _FAILED_SHOWN} more"


def _a_minute(count: int, seconds: float) -> str:
    return f"{60 * count / seconds:.0f}" if seconds else "-"


def _table(title: str, counts: Counts) -> Iterable[str]:
    if not counts:
        return
    yield from (f"| {title} | count |", "| --- | ---: |")
    for what, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"| {what.strip()} | {count} |"
    yield ""
