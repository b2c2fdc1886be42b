"""How far a benchmark is, on stderr: a bar on a terminal, else a line for each case, so that no log stays empty."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def told_cases(what: str, total: int, is_terminal: bool) -> Iterator[Callable[[str], None]]:
    """Yields what is to be called with each case's name before it is measured."""
    begun = 0
    with tqdm(total=total, desc=what, unit="case", disable=not is_terminal) as bar:

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(begun - bar.n)
            begun += 1
            if is_terminal:
                bar.set_postfix_str(name)
            else:
                tell(f"{what}: {name} ({begun} of {total})")

        yield begin
        bar.update(begun - bar.n)


def tell(line: str) -> None:
    """One line on stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
