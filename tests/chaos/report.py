"""One page about a trial: counts, ends, recovery times, memory and descriptors; and a plot."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.chaos.faults import Kind
from tests.chaos.plot import plot_trial
from tests.chaos.recovery import percentile
from tests.chaos.trial import Result

_WRONG_SHOWN = 20
_BARS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, float("inf"))
_WIDTH = 40


def write_report(result: Result, directory: Path, command: str, name: str = "chaos") -> Path:
    """Write NAME.md and NAME.png; returns the page."""
    directory.mkdir(parents=True, exist_ok=True)
    plot_trial(result, directory / f"{name}.png")
    path = directory / f"{name}.md"
    path.write_text("\n".join([*_page(result, command), f"\n![over time]({name}.png)"]) + "\n")
    return path


def _page(result: Result, command: str) -> Iterable[str]:
    plan, took = result.plan, result.ended - result.began
    yield f"# Chaos: {'nothing wrong' if not result.wrong else f'{len(result.wrong)} things are wrong'}\n"
    yield f"`{command}`, seed {plan.seed}; links: {result.links}.\n"
    per_s = len(result.records) / took
    yield f"{len(result.records)} requests of {plan.clients} clients in {took:.0f} s ({per_s:.1f}/s), "
    yield f"{sum(len(record.ids) for record in result.records)} tokens, {len(result.injected)} faults.\n"
    yield from _table(("request ended", "count"), [(end.value, count) for end, count in result.ends.most_common()])
    reasons = Counter(record.note for record in result.records if record.note)
    if reasons:
        yield from _table(("why refused", "count"), reasons.most_common(8))
    yield from _table(("fault", "count"), [*_faults(result), ("all", len(result.injected))])
    yield "Seconds from a fault to the first complete answer of a request begun after it, and until the last of the "
    yield "streams that it found continued (faults overlap; each is counted by itself):\n"
    yield from _table(("faults", "measure", "n", "p50", "p99", "most"), list(_recovery_rows(result)))
    yield from _histogram(result)
    yield "Processes (MiB and descriptors; before: the most of that name on the quiet cluster):\n"
    columns = ("process", "RSS before", "RSS most", "RSS after", "fds before", "fds most", "fds after")
    yield from _table(columns, list(_process_rows(result)))
    if result.wrong:
        yield "## Wrong\n"
        yield from (f"- {text}" for text in result.wrong[:_WRONG_SHOWN])
        if len(result.wrong) > _WRONG_SHOWN:
            yield f"- and {len(result.wrong) - _WRONG_SHOWN} more"


def _faults(result: Result) -> list[tuple[str, int]]:
    def words(kind: Kind, target: str) -> str:
        return f"{kind.value} {'node' if '-' in target else target}".replace("cut router", "cut node").replace(
            "cut one way router", "cut one way node"
        )

    counts = Counter(words(fault_done.fault.kind, fault_done.fault.target) for fault_done in result.injected)
    return counts.most_common()


def _recovery_rows(result: Result) -> Iterable[tuple[object, ...]]:
    pairs = list(zip(result.injected, result.recoveries(), strict=True))
    groups = {
        "kills": [r for s, r in pairs if s.fault.kind is Kind.KILL],
        "stops": [r for s, r in pairs if s.fault.kind is Kind.STOP],
        "SIGTERM": [r for s, r in pairs if s.fault.kind is Kind.TERM],
        "cuts": [r for s, r in pairs if s.fault.kind in (Kind.CUT, Kind.CUT_ONE_WAY)],
        "all": [r for _, r in pairs],
    }
    for group, recovered in groups.items():
        for measure, values in (
            ("next request served", [r.served_after_s for r in recovered if r.served_after_s is not None]),
            ("streams continued", [r.resumed_after_s for r in recovered if r.resumed_after_s is not None]),
        ):
            numbers = (percentile(values, share) for share in (0.5, 0.99, 1.0))
            yield (group, measure, len(values), *(f"{number:.2f}" for number in numbers))


def _histogram(result: Result) -> Iterable[str]:
    values = [r.resumed_after_s for r in result.recoveries() if r.resumed_after_s is not None]
    yield "```\nseconds until the last stream continued"
    low = 0.0
    for high in _BARS:
        count = sum(low <= value < high for value in values)
        yield f"{low:5.2f} - {high:5.2f} {count:4d} {'#' * round(_WIDTH * count / max(1, len(values)))}"
        low = high
    yield "```\n"


def _process_rows(result: Result) -> Iterable[tuple[object, ...]]:
    for name in dict.fromkeys(sample.name for sample in result.before):
        rows = [[s for s in samples if s.name == name] for samples in (result.before, result.samples, result.after)]
        rss = [f"{max((s.rss for s in row), default=0) / 2**20:.0f}" for row in rows]
        yield (name, *rss, *(max((s.descriptors for s in row), default=0) for row in rows))


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterable[str]:
    yield "| " + " | ".join(head) + " |"
    yield "| " + " | ".join("---" for _ in head) + " |"
    for row in rows:
        yield "| " + " | ".join(str(cell) for cell in row) + " |"
    yield ""
