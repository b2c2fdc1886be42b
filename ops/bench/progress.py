"""Progress of a benchmark on stderr: a bar on a terminal, else a line for each case."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def case_progress(what: str, total: int, is_terminal: bool) -> Iterator[Callable[[str], None]]:
    """Yields a function that must be called with each case's name before the case is measured."""
    begun = 0
    with tqdm(total=total, desc=what, unit="case", disable=not is_terminal) as bar:

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(begun - bar.n)
            begun += 1
            if is_terminal:
                bar.set_postfix_str(name)
            else:
                write_progress(f"{what}: {name} ({begun} of {total})")

        yield begin
        bar.update(begun - bar.n)


def write_progress(line: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
