"""The files of a router worker's metrics: given their room before they are mapped.

The prometheus client makes sparse files and maps them: where the disk is full, the first write into such a page ends
the process by SIGBUS. With the room reserved that cannot be, and without it the worker does without the files.
"""

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

_LOG = logging.getLogger("kvferry.router")

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
KINDS = ("counter", "histogram", "gauge_livesum", "gauge_livemostrecent")
"""One file each: how the client names them after what `router.http.metrics` has."""
RESERVED_BYTES = 262_144
"""Of each file: twenty models. A file grows beyond that without a reservation."""


def reserve_metrics_files(environ: MutableMapping[str, str], pid: int) -> None:
    """Give the files of this worker their room, before the prometheus client is imported.

    Where there is none the variable is taken out of `environ`, with a warning: then `/metrics` tells the numbers of the
    one worker that answers, and requests are served.
    """
    directory = environ.get(VARIABLE, "")
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
        del environ[VARIABLE]
        _LOG.warning(
            "%s: no room for metrics (%s): /metrics tells the numbers of one worker only", directory, error.strerror
        )


def forget_gauges(environ: MutableMapping[str, str], pid: int) -> None:
    """The gauges of a worker that is gone do not count any more; what it counted does."""
    directory = environ.get(VARIABLE, "")
    for file in Path(directory).glob(f"gauge_live*_{pid}.db") if directory else ():
        file.unlink(missing_ok=True)
