"""What the soak keeps of its runs, and the page about them."""

from collections.abc import Iterable

import msgspec

_RSS_SHARE, _RSS_BYTES = 0.03, 6 << 20
_WRONG_SHOWN = 20


class Grown(msgspec.Struct, frozen=True):
    """One process in one run: memory after warming up and at the end (medians), descriptors before and after it.

    Descriptors are compared without clients: which worker has how many connections is the kernel's choice.
    """

    name: str
    pid: int
    rss_then: int
    rss_end: int
    descriptors_then: int
    descriptors_end: int

    @property
    def is_flat(self) -> bool:
        return (
            self.rss_end <= self.rss_then * (1 + _RSS_SHARE) + _RSS_BYTES
            and self.descriptors_end <= self.descriptors_then
        )


class Run(msgspec.Struct):
    """One run of the soak."""

    requests: int
    seconds: float
    ends: dict[str, int]
    wrong: list[str]
    processes: list[Grown]


class State(msgspec.Struct):
    """All runs so far."""

    runs: list[Run] = []

    @property
    def requests(self) -> int:
        return sum(run.requests for run in self.runs)

    @property
    def is_clean(self) -> bool:
        """Nothing wrong, and every process flat, as far as runs were long enough to judge; one was."""
        judged = [grown for run in self.runs for grown in run.processes]
        return bool(judged) and all(grown.is_flat for grown in judged) and not any(run.wrong for run in self.runs)


def page(state: State, command: str, picture: str) -> str:
    """The report; `picture`: the name of the last run's, next to it."""
    lines = [f"# Soak: {state.requests} requests, {'nothing wrong' if state.is_clean else 'not clean'}", ""]
    lines += [f"`{command}`, {len(state.runs)} runs.", ""]
    for number, run in enumerate(state.runs, 1):
        lines += _of_run(number, run)
    wrong = [text for run in state.runs for text in run.wrong]
    return "\n".join([*lines, *(f"- {text}" for text in wrong[:_WRONG_SHOWN]), f"![over time]({picture})"]) + "\n"


def _of_run(number: int, run: Run) -> Iterable[str]:
    ends = ", ".join(f"{count} {end}" for end, count in run.ends.items())
    yield f"Run {number}: {run.requests} in {run.seconds:.0f} s ({run.requests / run.seconds:.0f}/s): {ends}."
    if not run.processes:
        yield from ("", "Too short to judge whether memory is flat.", "")
        return
    yield from ("", "| process | RSS MiB | at the end | descriptors | at the end | flat |", "|" + " --- |" * 6)
    for grown in run.processes:
        rss = f"{grown.rss_then / 2**20:.1f} | {grown.rss_end / 2**20:.1f}"
        descriptors = f"{grown.descriptors_then} | {grown.descriptors_end}"
        yield f"| {grown.name} | {rss} | {descriptors} | {'yes' if grown.is_flat else 'NO'} |"
    yield ""
