"""Ends of processes that no fault explains, by what the launcher and gunicorn wrote. Pure."""

import re

_CHILD = re.compile(r"launcher: (\S+) was killed by signal (\d+)|launcher: (\S+) exited with code (\d+)")
_WORKER = re.compile(r"Worker \(pid:(\d+)\) was sent (SIG[A-Z]+)|Worker \(pid:(\d+)\) exited with code (\d+)")
_DONE_TO_THEM = {"9", "15", "SIGKILL", "SIGTERM"}
_ORDERLY = "0"


def unexplained_deaths(log: str) -> list[str]:
    """Every end by a signal that no fault sent (SIGABRT: an assertion; SIGSEGV), and every exit code but 0."""
    found = []
    for line in log.splitlines():
        for pattern in (_CHILD, _WORKER):
            match = pattern.search(line)
            if match and match[2] not in _DONE_TO_THEM and match[4] != _ORDERLY:
                found.append(f"a process ended by itself: {line}"[:600])
    return found
