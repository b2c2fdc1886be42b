"""The error tree: whose fault it is, whether trying again can help. May not know about HTTP or ZeroMQ.

The HTTP layer maps these to a status in one place (`router.http.errors`).
"""


class KvferryError(Exception):
    """Base of every error that this project raises on purpose; its text is fit for a user."""

    retryable = False


class ConfigError(KvferryError):
    """The configuration or the command line is wrong: says which key and what would be right."""


class ModelLoadError(KvferryError):
    """A checkpoint cannot be served: missing file, unknown architecture, unsupported setting."""


class DeviceUnavailableError(KvferryError):
    """The wanted device is not on this machine; the text says what is missing."""


class RequestInvalidError(KvferryError):
    """The client's input breaks a rule; the text says which and where."""


class ModelNotFoundError(KvferryError):
    """The client named a model that this router never knew."""


class OverloadedError(KvferryError):
    """A bound is reached; the same request may pass later."""

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
    """The model could not generate: not-a-number logits, say."""


class OutOfSocketsError(KvferryError):
    """This process has no descriptor, or ZeroMQ no socket, left; one may come free."""

    retryable = True

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"no {what}: {reason} (see ulimit -n)")
        self.reason = reason


class ProtocolError(KvferryError):
    """A peer sent something that the control protocol does not allow."""


class InvariantError(KvferryError):
    """A state machine met an event it has no row for, or a table lost its balance: a bug on our side."""
