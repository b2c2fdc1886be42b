"""Compares kvferry with the best peer, row by row, and with its target. Pure."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvferry.ops.bench.report import EngineReport, PeerReport, Rate

PREFILL_FACTOR = 1.05
DECODE_FACTORS = {"1": 0.95, "8": 1.1, "32": 1.15}
"""Target as a factor of the best peer's rate, by number of sequences; 1 for other numbers."""


class Row(msgspec.Struct, frozen=True):
    """One figure; None in the fields of the peer if no peer has it."""

    row: str
    ours: float
    best_peer: float | None
    peer: str
    """Name of the best peer."""
    target: float | None
    met: bool | None


def compare_with_peers(report: EngineReport) -> list[Row]:
    """Rates (higher is better), then the time to load the model and memory (lower is better)."""
    peers = [peer for peer in report.peers or () if not peer.error]
    rows = [
        _row(f"{kind} {size}, tokens/s", rate.tok_s, _rates(peers, kind, size), factor, most=True)
        for kind, rates in (("prefill", report.prefill), ("decode", report.decode))
        for size, rate in rates.items()
        for factor in [PREFILL_FACTOR if kind == "prefill" else DECODE_FACTORS.get(size, 1.0)]
    ]
    ready = [(peer.ready_s, peer.name) for peer in peers if peer.ready_s is not None]
    memory = [(float(peer.rss_mb), peer.name) for peer in peers if peer.rss_mb is not None]
    rows.append(_row("ready, s", report.ready_s, ready, 1.0, most=False))
    rows.append(_row("memory, MB", float(report.rss_mb), memory, 1.0, most=False))
    return rows


def comparison_table(report: EngineReport, rows: Sequence[Row]) -> Iterator[str]:
    """The comparison as lines of text."""
    yield f"{'':<22}{'ours':>10}{'best peer':>12}  {'':<14}{'target':>10}  met"
    for row in rows:
        if row.best_peer is None or row.target is None:
            yield f"{row.row:<22}{row.ours:>10.1f}{'-':>12}"
            continue
        met = "yes" if row.met else "no"
        yield f"{row.row:<22}{row.ours:>10.1f}{row.best_peer:>12.1f}  {row.peer:<14}{row.target:>10.1f}  {met}"
    for peer in report.peers or ():
        yield f"{peer.name}: {peer.error or f'version {peer.version}'}"


def _rates(peers: Iterable[PeerReport], kind: str, size: str) -> list[tuple[float, str]]:
    found = []
    for peer in peers:
        rates: dict[str, Rate] = peer.prefill if kind == "prefill" else peer.decode
        if size in rates:
            found.append((rates[size].tok_s, peer.name))
    return found


def _row(name: str, ours: float, peers: Sequence[tuple[float, str]], factor: float, *, most: bool) -> Row:
    if not peers:
        return Row(name, ours, None, "", None, None)
    best, peer = max(peers) if most else min(peers)
    target = round(best * factor, 1)
    return Row(name, ours, best, peer, target, ours >= target if most else ours <= target)
