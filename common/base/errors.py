"""The error tree: who is at fault, and whether a retry can help. Must not depend on HTTP or ZeroMQ.

The HTTP layer maps these errors to status codes in one place (`router.http.errors`).
"""


class KvferryError(Exception):
    """Base of every error that this project raises on purpose. Its text is written for users."""

    retryable = False


class ConfigError(KvferryError):
    """The configuration or the command line is wrong. The text names the key and what is expected."""


class ModelLoadError(KvferryError):
    """A checkpoint cannot be served: missing file, unknown architecture, unsupported setting."""


class DeviceUnavailableError(KvferryError):
    """The requested device is not available on this machine. The text names what is missing."""


class RequestInvalidError(KvferryError):
    """The client's input is invalid. The text names the rule and the field."""


class ModelNotFoundError(KvferryError):
    """The client named a model that no node has ever announced to this router."""


class OverloadedError(KvferryError):
    """A limit is reached. The same request may succeed later."""

    retryable = True

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(KvferryError):
    """No node can serve now, or this process is draining."""

    retryable = True

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GenerationError(KvferryError):
    """The model failed to generate, for example because its logits are NaN."""


class OutOfSocketsError(KvferryError):
    """The process ran out of file descriptors, or ZeroMQ out of sockets. Retry after some are closed."""

    retryable = True

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"cannot open {what}: {reason}; raise the limit of open files (ulimit -n)")
        self.reason = reason


class ProtocolError(KvferryError):
    """A peer sent something that the control protocol does not permit."""


class InvariantError(KvferryError):
    """A bug in this project: an event without a transition, or tables that contradict each other."""
