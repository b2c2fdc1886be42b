"""The report of `kvferry bench engine`: a JSON object, or a table as text. Pure.

`ops/docs/bench.md` describes the keys; their meaning must not change.
"""

from collections.abc import Iterator

import msgspec

from kvferry.ops.cli.pluralize import pluralize


class MachineFacts(msgspec.Struct, frozen=True):
    """Limits of the machine, measured in the same run."""

    read_gb_s: float
    matmul_gflop_s: float


class Rate(msgspec.Struct, frozen=True):
    """Throughput of one case."""

    tok_s: float
    of_limit: float | None
    """Share of what the machine's limits allow, 0 to 1; None if unknown."""


class PeerReport(msgspec.Struct, frozen=True):
    """The report of another engine; with an `error`, all other fields are empty."""

    name: str
    error: str = ""
    version: str = ""
    prefill: dict[str, Rate] = {}
    decode: dict[str, Rate] = {}
    ready_s: float | None = None
    rss_mb: int | None = None


class EngineReport(msgspec.Struct, frozen=True):
    """One run. The keys of `prefill` are prompt lengths, those of `decode` numbers of sequences."""

    model: str
    dtype: str
    quantization: str
    threads: int
    ops: str
    machine: MachineFacts
    prefill: dict[str, Rate]
    decode: dict[str, Rate]
    ready_s: float
    """Seconds from the start of the process until the model was loaded and its cache allocated."""
    rss_mb: int
    ranks: int = 1
    """Tensor-parallel processes, which shared the threads; `rss_mb` is that of the first one."""
    peers: list[PeerReport] | None = None
    """None: not requested."""


def engine_table(report: EngineReport) -> Iterator[str]:
    """The report as lines of text."""
    weights = "" if report.quantization == "none" else f"weights {report.quantization}  "
    ranks = f"  over {report.ranks} ranks" if report.ranks > 1 else ""
    yield f"{report.model}  {report.dtype}  {weights}{pluralize(report.threads, 'thread')}{ranks}  {report.ops}"
    machine = report.machine
    yield f"machine    reads {machine.read_gb_s:.1f} GB/s, multiplies {machine.matmul_gflop_s:.0f} GFLOP/s"
    for kind, unit, rates in (("prefill", "tokens", report.prefill), ("decode", "sequences", report.decode)):
        for size, rate in rates.items():
            share = "" if rate.of_limit is None else f"{rate.of_limit:7.0%} of the limit"
            yield f"{kind:<8} {size:>5} {unit:<9} {rate.tok_s:9.1f} tokens/s {share}"
    yield f"ready after {report.ready_s:.1f} s, {report.rss_mb} MB"
