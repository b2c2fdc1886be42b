"""Cuts long runs of scalars out of a large JSON body while it arrives, window by window. Pure; no IO, no waiting.

Why: a C decoder holds the interpreter for as long as it runs, so a prompt of a million ids decoded in one call would
stop every other request of the worker for tens of milliseconds. Cut into windows the same decoder is as fast, and the
caller lets others run in between.

How: outside of strings, text between a `[` or `,` and a `,` or `]` that holds no quote, bracket or brace is a run of
whole array elements, in every valid document. A long run is decoded at once (`ParsedTokenIds`) and leaves one string in
the rest, a random token that no client can know. The rest is small and decoded as usual; where it is valid, so was the
body. Searches are `bytes.find`, so quiet stretches cost next to nothing; the number of steps per window is bounded.
"""

import os

from kvferry.common.base.errors import InvariantError
from kvferry.router.http.number_run import MalformedJsonError, ParsedTokenIds

WINDOW_BYTES = 65_536
"""What one step looks at: well below a millisecond of decoding."""
MIN_RUN_BYTES = 4_096
"""Shorter runs stay in the rest."""
MIN_RUN_ELEMENTS = 64
"""So do runs with fewer elements in their first MIN_RUN_BYTES (blanks, then): whoever finds a string in place of an
array's elements may take it that there were many."""
_MAX_HOPS = 16
"""Brackets looked at in one quiet stretch of a window before it is left as it is."""
_MAX_QUOTES_A_STEP = 1_000
"""Quotes looked at in one step: each costs about a microsecond."""
_MAX_QUOTES = 100_000
"""Quotes looked at before the remaining body is left as it is."""
_ENDS = (b"]", b'"', b"[", b"{", b"}")


class RunCutter:
    """Takes a body in windows; afterwards `rest` is the body without its long runs, and `runs` has these."""

    def __init__(self, vocab_size: int) -> None:
        self.rest = bytearray()
        self.runs: dict[str, ParsedTokenIds] = {}
        """By the token that stands for the run in `rest`, as a JSON string of its own."""
        self._vocab_size = vocab_size
        self._prefix = os.urandom(16).hex()
        self._in_string = False
        self._escaped = False
        """The last window ended in a backslash that escapes the next byte."""
        self._num_quotes = 0
        self._run: ParsedTokenIds | None = None
        self._run_is_whole = False
        """The current run began at a `[`, not at a comma."""
        self._carry: list[bytes] = []
        """Text of the current run behind its last comma so far, in parts: it may be as long as the body."""

    def feed(self, window: bytes, position: int = 0) -> int:
        """Take in `window`, of at most WINDOW_BYTES, from `position` on, and return up to where.

        That is the whole window, unless it has very many strings. Raises MalformedJsonError.
        """
        quotes_before = self._num_quotes
        while position < len(window) and self._num_quotes - quotes_before < _MAX_QUOTES_A_STEP:
            if self._run is not None:
                position = self._inside_run(self._run, window, position)
            elif self._num_quotes > _MAX_QUOTES:
                self.rest += window[position:]
                return len(window)
            elif self._in_string:
                position = self._inside_string(window, position)
            else:
                position = self._outside(window, position)
        return position

    def finish(self) -> None:
        """The body is over. Raises MalformedJsonError where it ends in the middle of an array."""
        if self._run is not None:
            raise MalformedJsonError("the text ends inside an array")

    def check_invariants(self) -> None:
        """Raise InvariantError where the parts of the state contradict one another."""
        if self._run is not None and self._in_string:
            raise InvariantError("inside a run and a string at once")
        if self._carry and self._run is None:
            raise InvariantError("text is carried for no run")
        for ids in self.runs.values():
            ids.check_invariants()

    def _outside(self, window: bytes, position: int) -> int:
        quote = window.find(b'"', position)
        end = quote if quote >= 0 else len(window)
        start = _find_run(window, position, end)
        if start >= 0:
            self.rest += window[position:start]
            self._run = ParsedTokenIds(self._vocab_size)
            self._run_is_whole = window[start - 1] == ord("[")
            return start
        if quote < 0:
            self.rest += window[position:]
            return len(window)
        self.rest += window[position : quote + 1]
        self._in_string = True
        self._num_quotes += 1
        return quote + 1

    def _inside_string(self, window: bytes, position: int) -> int:
        start = position
        if self._escaped:
            self._escaped = False
            position += 1
        quote = window.find(b'"', position)
        end = quote if quote >= 0 else len(window)
        # An odd number of backslashes escapes what comes next.
        backslashes = end - position - len(window[position:end].rstrip(b"\\"))
        if quote < 0:
            self._escaped = backslashes % 2 == 1
            self.rest += window[start:]
            return len(window)
        self.rest += window[start : quote + 1]
        self._in_string = backslashes % 2 == 1
        self._num_quotes += 1
        return quote + 1

    def _inside_run(self, run: ParsedTokenIds, window: bytes, position: int) -> int:
        end = _find_end(window, position, len(window))
        if end < len(window) and window[end] == ord("]"):
            self._feed_last(run, self._take_carry() + window[position:end])
            self._leave_run(run, b"")
            return end
        comma = window.rfind(b",", position, end)
        if comma >= 0:
            self._feed(run, self._take_carry() + window[position:comma])
            position = comma + 1
        self._carry.append(window[position:end])
        if end < len(window):
            # An element that is no plain scalar: it stays in the rest, with the comma before it.
            self._leave_run(run, (b"," if run.count else b"") + self._take_carry())
        return end

    def _take_carry(self) -> bytes:
        carry = b"".join(self._carry)
        self._carry.clear()
        return carry

    def _feed(self, run: ParsedTokenIds, text: bytes) -> None:
        if not run.feed(text):
            raise MalformedJsonError("a comma without an element before it")

    def _feed_last(self, run: ParsedTokenIds, text: bytes) -> None:
        if not run.feed(text) and (run.count or not self._run_is_whole):
            raise MalformedJsonError("a comma without an element after it")

    def _leave_run(self, run: ParsedTokenIds, tail: bytes) -> None:
        if run.count:
            token = f"{self._prefix}{len(self.runs)}"
            self.runs[token] = run
            self.rest += b'"' + token.encode() + b'"'
        self.rest += tail
        self._run = None


def _find_run(window: bytes, position: int, end: int) -> int:
    """Where a run begins that is long within [position, end), which has no quote; -1 where none is."""
    for _ in range(_MAX_HOPS):
        if end - position < MIN_RUN_BYTES:
            return -1
        bracket = window.find(b"[", position, end)
        comma = window.find(b",", position, bracket if bracket >= 0 else end)
        before = comma if comma >= 0 else bracket
        if before < 0:
            return -1
        stop = _find_end(window, before + 1, end)
        dense = window.count(b",", before + 1, before + MIN_RUN_BYTES) >= MIN_RUN_ELEMENTS
        if dense and stop - before > MIN_RUN_BYTES:
            return before + 1
        position = stop
    return -1


def _find_end(window: bytes, position: int, end: int) -> int:
    """The first quote, bracket or brace in [position, end), else `end`."""
    for byte in _ENDS:
        found = window.find(byte, position, end)
        if found >= 0:
            end = found
    return end
