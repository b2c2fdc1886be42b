"""Queues of work on a device, as cuda and npu both have them. Types alone."""

from contextlib import AbstractContextManager
from typing import Protocol, TypeVar


class DeviceStream(Protocol):
    """A queue of work on the device."""

    def synchronize(self) -> None:
        """Wait until all work given so far is done."""
        ...


Stream = TypeVar("Stream", bound=DeviceStream)
GivenStream = TypeVar("GivenStream", bound=DeviceStream, contravariant=True)


class StreamApi(Protocol[GivenStream]):
    """Of torch.cuda and torch_npu.npu."""

    def stream(self, stream: GivenStream) -> AbstractContextManager[object]:
        """Work given inside goes to `stream`."""
        ...
