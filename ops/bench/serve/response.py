"""Parses an HTTP/1.1 answer and the server-sent events in it. Pure: no socket, no clock.

Small on purpose: it runs for every token of every measured stream and must not dominate the measurement.
"""

_MOST_HEAD_BYTES = 65_536
_NO_BODY = (204, 304)


class MalformedAnswerError(Exception):
    """The bytes are not a valid HTTP answer."""


class ResponseReader:
    """Parses one answer, passed to `feed` in parts; `head_done` and `complete` are its progress."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """Names in lower case."""
        self.head_done = False
        self.complete = False
        self._buffer = b""
        self._left: int | None = 0
        """Remaining bytes of the body, or of the chunk with its line end; None: the body ends with the connection."""
        self._chunked = False

    @property
    def keeps_connection(self) -> bool:
        """Whether another request can follow on the same connection."""
        return self.complete and self._left is not None and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`. Raises MalformedAnswerError."""
        if self.complete:
            raise MalformedAnswerError("bytes after the end of the answer")
        self._buffer += data
        if not self.head_done and not self._read_head():
            return b""
        return self._read_chunks() if self._chunked else self._read_plain()

    def end(self) -> bool:
        """Handle the end of the connection; returns whether the answer is complete."""
        if self.head_done and self._left is None:
            self.complete = True
        return self.complete

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MOST_HEAD_BYTES:
                raise MalformedAnswerError(f"a head of more than {_MOST_HEAD_BYTES} bytes")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        self._buffer = self._buffer[end + 4 :]
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise MalformedAnswerError(f"expected an HTTP/1.1 answer, got {first[:60]!r}")
        self.status = int(words[1])
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._choose_framing()
        self.head_done = True
        return True

    def _choose_framing(self) -> None:
        length = self.headers.get("content-length")
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        if self._chunked:
            return
        if self.status in _NO_BODY:
            length = "0"
        if length is not None and not length.isdigit():
            raise MalformedAnswerError(f"content-length is not a number: {length[:20]!r}")
        self._left = None if length is None else int(length)

    def _read_plain(self) -> bytes:
        body, self._buffer = self._buffer, b""
        if self._left is not None:
            self._buffer = body[self._left :]
            body = body[: self._left]
            self._left -= len(body)
            self.complete = not self._left
        return body

    def _read_chunks(self) -> bytes:
        body = []
        while not self.complete:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                break
            size = _chunk_size(self._buffer[:end])
            # The last chunk is empty. Trailers are not supported: no measured server sends any.
            whole = end + 2 + size + 2
            if len(self._buffer) < whole:
                break
            body.append(self._buffer[end + 2 : whole - 2])
            self._buffer = self._buffer[whole:]
            self.complete = not size
        return b"".join(body)


class EventSplitter:
    """Splits a body, passed in parts, into server-sent events. One `data:` line is one event, as with LLM servers."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event line that is now complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise MalformedAnswerError(f"chunk size is not a number: {line[:20]!r}") from None
