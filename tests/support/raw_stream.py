"""A token request over a plain socket: the test sees every byte as it comes, and leaves when it wants."""

import json
import socket
import struct
from types import TracebackType
from typing import Any

from tests.support.bodies import body_of
from tests.support.serve import Served

_TIMEOUT_S = 120.0


class RawRequest:
    """One request that was sent. Use it as a context manager."""

    def __init__(self, served: Served, prompt: list[int], *, streamed: bool, **parameters: Any) -> None:
        client_id = parameters.pop("id", None)
        body = json.loads(body_of(prompt, **parameters)) | ({"id": client_id} if client_id else {})
        text = json.dumps(body).encode()
        accept = "Accept: text/event-stream\r\n" if streamed else ""
        head = (
            f"POST /v2/models/{served.model}/infer HTTP/1.1\r\nHost: x\r\n{accept}Content-Length: {len(text)}\r\n\r\n"
        )
        self.socket = socket.create_connection(("127.0.0.1", served.port), timeout=_TIMEOUT_S)
        self._file = self.socket.makefile("rb")
        self._content_length = 0
        self.socket.sendall(head.encode() + text)

    def __enter__(self) -> "RawRequest":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        self.socket.close()

    @property
    def port(self) -> int:
        """This end of the connection."""
        port: int = self.socket.getsockname()[1]
        return port

    def status(self) -> int:
        """Read the head; its status. 0 when the connection ended before it."""
        line = self._file.readline()
        while (header := self._file.readline()).strip():
            name, _, value = header.partition(b":")
            if name.lower() == b"content-length":
                self._content_length = int(value)
        return int(line.split()[1]) if line else 0

    def body(self) -> dict[str, Any]:
        """Read the answer's JSON, after its head."""
        value: dict[str, Any] = json.loads(self._file.read(self._content_length))
        return value

    def events(self, count: int = 1 << 30) -> list[dict[str, Any]]:
        """Read that many events, or those up to the end. EOFError when the answer breaks off."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            size = self._file.readline()
            if not size:
                raise EOFError(f"the stream broke off after {len(found)} events")
            data = self._file.read(int(size, 16) + 2)
            if data == b"\r\n":
                return found
            found += [json.loads(text.removeprefix(b"data: ")) for text in data.split(b"\n\n") if text.strip()]
        return found

    def reset(self) -> None:
        """Leave with a reset, as a process does that is killed with unread data."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._file.close()
        self.socket.close()
