"""Reserves disk space for the metrics files of a router worker before they are mapped.

The prometheus client creates sparse files and maps them: on a full disk, the first write to such a page kills the
process with SIGBUS. Reserved space rules that out; without space the worker runs without the files.
"""

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

_LOG = logging.getLogger("kvferry.router")

METRICS_DIR_ENV = "PROMETHEUS_MULTIPROC_DIR"
KINDS = ("counter", "histogram", "gauge_livesum", "gauge_livemostrecent")
"""The prometheus client writes one file for each; the kinds are those that `router.http.metrics` uses."""
RESERVED_BYTES = 262_144
"""Space for each file, enough for twenty models. A file that grows beyond it does so without a reservation."""


def reserve_metrics_files(environ: MutableMapping[str, str], pid: int) -> None:
    """Reserve space for the files of worker `pid`. Must be called before the prometheus client is imported.

    If there is no space, removes the variable from `environ` with a warning: requests are served, and `/metrics`
    reports only the worker that answers it.
    """
    directory = environ.get(METRICS_DIR_ENV, "")
    if not directory:
        return
    files = [Path(directory) / f"{kind}_{pid}.db" for kind in KINDS]
    try:
        for file in files:
            with file.open("ab") as opened:
                os.posix_fallocate(opened.fileno(), 0, RESERVED_BYTES)
    except OSError as error:
        for file in files:
            file.unlink(missing_ok=True)
        del environ[METRICS_DIR_ENV]
        _LOG.warning(
            "%s: cannot reserve space for metrics (%s): /metrics reports one worker only", directory, error.strerror
        )


def forget_gauges(environ: MutableMapping[str, str], pid: int) -> None:
    """Remove the gauges of a worker that exited; its counters stay in the sums."""
    directory = environ.get(METRICS_DIR_ENV, "")
    for file in Path(directory).glob(f"gauge_live*_{pid}.db") if directory else ():
        file.unlink(missing_ok=True)
