"""How long a fault was felt: until the next request was served, and until the streams that it found continued. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.client import End, Record


@dataclass(frozen=True)
class Recovery:
    """One fault. None: nothing was there to be measured."""

    served_after_s: float | None
    """Until the first answer to a request that began after the fault was complete."""
    resumed_after_s: float | None
    """Until the last of the streams that were under way had its next token."""
    streams: int


def recoveries(times: Sequence[float], records: Sequence[Record]) -> list[Recovery]:
    """One for each fault, in their order."""
    return [Recovery(_served_after(at, records), *_resumed_after(at, records)) for at in times]


def _served_after(at: float, records: Sequence[Record]) -> float | None:
    ends = (record.ended for record in records if record.started >= at and record.end is End.COMPLETE)
    return min((ended - at for ended in ends), default=None)


def _resumed_after(at: float, records: Sequence[Record]) -> tuple[float | None, int]:
    waits = []
    for record in records:
        times = record.event_times
        # Only streams that go to their end: one that was lost or left is counted elsewhere.
        if record.end is End.COMPLETE and times and times[0] <= at < times[-1]:
            waits.append(times[bisect_right(times, at)] - at)
    return max(waits, default=None), len(waits)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; nan where there is none."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]
