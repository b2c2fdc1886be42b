"""The report of `kvferry bench serve`: computed from outcomes; a JSON object, or a table as text. Pure.

`ops/docs/bench.md` describes the keys; their meaning must not change.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvferry.ops.bench.serve.load import RequestLoad
from kvferry.ops.bench.serve.request import RequestOutcome
from kvferry.ops.cli.pluralize import pluralize

_MS = 1000.0


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles of times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class ClientCost(msgspec.Struct, frozen=True):
    """Load of the client: whether it limited the measurement."""

    cpu_share: float
    """CPU time as a share of one core, while requests were in progress."""
    late_ms_max: float
    """Longest delay between a request's due time and its sending."""


class ServeReport(msgspec.Struct, frozen=True):
    """One run without its warm-up. A Spread is None if there are no such times."""

    url: str
    model: str
    api: str
    mode: str
    concurrency: int | None
    rate: float | None
    requests: int
    warmup_requests: int
    input_len: int
    output_len: int
    seed: int
    duration_s: float
    completed: int
    short: int
    failed: int
    errors: dict[str, int]
    ttft_ms: Spread | None
    first_gap_ms: Spread | None
    first_gap_hidden: int
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    input_tokens: int
    output_tokens: int
    output_tok_s: float
    request_s: float
    tokens_per_arrival: float
    tokens_counted_by: str
    client: ClientCost


class Frame(msgspec.Struct, frozen=True):
    """Facts of the whole run."""

    url: str
    model: str
    api: str
    warmup_requests: int
    cpu_s: float


def make_report(frame: Frame, load: RequestLoad, outcomes: Sequence[RequestOutcome]) -> ServeReport:
    """The report of at least one outcome. Only complete answers count for times and tokens."""
    whole = [outcome for outcome in outcomes if not outcome.error]
    # From the first due time, when the first client starts to wait.
    duration = max(outcome.ended for outcome in outcomes) - min(outcome.due for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in whole)
    arrivals = sum(len(outcome.arrivals) for outcome in whole)
    gaps = [first_gap(outcome) for outcome in whole if outcome.tokens > 1]
    return ServeReport(
        url=frame.url,
        model=frame.model,
        api=frame.api,
        mode="closed" if load.concurrency is not None else "poisson",
        concurrency=load.concurrency,
        rate=load.rate,
        requests=len(outcomes),
        warmup_requests=frame.warmup_requests,
        input_len=load.input_len,
        output_len=load.output_len,
        seed=load.seed,
        duration_s=round(duration, 4),
        completed=len(whole),
        short=sum(outcome.tokens < load.output_len for outcome in whole),
        failed=len(outcomes) - len(whole),
        errors=dict(sorted(Counter(outcome.error for outcome in outcomes if outcome.error).items())),
        ttft_ms=spread(outcome.arrivals[0][0] - outcome.due for outcome in whole if outcome.arrivals),
        first_gap_ms=spread(gap for gap in gaps if gap is not None),
        first_gap_hidden=sum(gap is None for gap in gaps),
        itl_ms=spread(gap for outcome in whole for gap in token_gaps(outcome)),
        tpot_ms=spread(mean for outcome in whole if (mean := mean_gap(outcome)) is not None),
        e2e_ms=spread(outcome.ended - outcome.due for outcome in whole),
        input_tokens=load.input_len * len(whole),
        output_tokens=tokens,
        output_tok_s=round(tokens / duration, 2),
        request_s=round(len(whole) / duration, 3),
        tokens_per_arrival=round(tokens / arrivals, 3) if arrivals else 0.0,
        tokens_counted_by="+".join(sorted({outcome.counted_by for outcome in whole})),
        client=ClientCost(
            cpu_share=round(frame.cpu_s / duration, 3),
            late_ms_max=round(max(outcome.sent - outcome.due for outcome in outcomes) * _MS, 3),
        ),
    )


def first_gap(outcome: RequestOutcome) -> float | None:
    """Seconds from the first to the second token; None if they arrived together."""
    if len(outcome.arrivals) < 2 or outcome.arrivals[0][1] > 1:
        return None
    return outcome.arrivals[1][0] - outcome.arrivals[0][0]


def token_gaps(outcome: RequestOutcome) -> Iterator[float]:
    """Seconds before each token after the first arrival; of tokens that arrive together, all but one count 0."""
    for (before, _), (now, count) in zip(outcome.arrivals, outcome.arrivals[1:], strict=False):
        yield now - before
        yield from [0.0] * (count - 1)


def mean_gap(outcome: RequestOutcome) -> float | None:
    """Seconds per token (TPOT): time from first to last arrival, divided by the tokens after the first arrival."""
    if len(outcome.arrivals) < 2:
        return None
    later = outcome.tokens - outcome.arrivals[0][1]
    return (outcome.arrivals[-1][0] - outcome.arrivals[0][0]) / later if later > 0 else None


def spread(seconds: Iterable[float]) -> Spread | None:
    """Convert to milliseconds; percentiles by nearest rank, so they are measured values."""
    ordered = sorted(value * _MS for value in seconds)
    if not ordered:
        return None
    ranks = (ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.5, 0.9, 0.99, 1.0))
    return Spread(round(math.fsum(ordered) / len(ordered), 3), *(round(value, 3) for value in ranks))


def serve_table(report: ServeReport) -> Iterator[str]:
    """The report as lines of text."""
    how = (
        f"concurrency {report.concurrency}"
        if report.concurrency is not None
        else f"{report.rate:g} requests/s, Poisson"
    )
    sizes = f"{pluralize(report.input_len, 'token')} in, {report.output_len} out"
    yield f"{report.model} at {report.url} ({report.api}): {sizes}, {how}"
    yield f"requests  {report.completed} completed, {report.failed} failed in {report.duration_s:.2f} s"
    for kind, count in report.errors.items():
        yield f"          {count} {kind}"
    if report.short:
        yield f"          {report.short} ended before {pluralize(report.output_len, 'token')}"
    yield f"output    {report.output_tok_s:.1f} tokens/s, {report.request_s:.2f} requests/s"
    yield f"{'ms':<22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"
    rows = {
        "first token": report.ttft_ms,
        "first to second": report.first_gap_ms,
        "between tokens": report.itl_ms,
        "per token of a request": report.tpot_ms,
        "whole request": report.e2e_ms,
    }
    for name, times in rows.items():
        if times is not None:
            values = (times.mean, times.p50, times.p90, times.p99, times.max)
            yield f"{name:<22}" + "".join(f"{value:>10.1f}" for value in values)
    if report.first_gap_hidden:
        yield f"{pluralize(report.first_gap_hidden, 'request')}: first and second token arrived together"
    if report.tokens_counted_by not in ("ids", ""):
        yield f"tokens counted by {report.tokens_counted_by}; {report.tokens_per_arrival:g} per arrival"
    yield f"client    {report.client.cpu_share:.0%} of a core, at most {report.client.late_ms_max:.1f} ms late"
