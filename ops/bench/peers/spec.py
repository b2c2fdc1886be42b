"""Input and output of a peer's process. May import the standard library only: it runs in the peer's interpreter."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

_KIB = 1024


@dataclass(frozen=True)
class PeerTask:
    """The cases to measure, the same for every peer."""

    model: str
    """A HuggingFace directory or a GGUF file."""
    dtype: str
    """bfloat16 or float32, for weights and computation."""
    threads: int
    prompts: list[int]
    batches: list[int]
    context: int
    decode_steps: int
    rounds: int
    vocab_size: int
    seed: int = 1

    def to_json(self) -> str:
        """The task as JSON, for the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PeerTask":
        """Inverse of `to_json`."""
        return cls(**json.loads(text))

    @property
    def prompt_room(self) -> int:
        """Tokens of the longest prompt and its one output token."""
        return max([*self.prompts, 0]) + 1

    @property
    def decode_room(self) -> int:
        """Tokens of a sequence in the decode cases, with steps that are not timed."""
        return self.context + 2 * self.decode_steps + max([*self.batches, 0])


@dataclass(frozen=True)
class PeerTimes:
    """Median seconds of each case."""

    version: str
    ready_s: float
    """Seconds from the start of the process until the model was loaded."""
    rss_mb: int
    prefill: dict[str, float]
    """Prompt length -> time of a whole prompt to its first token."""
    decode: dict[str, float]
    """Number of sequences -> time of a step that gives each sequence one token."""


class Peer(Protocol):
    """A loaded peer."""

    version: str

    def prompt(self, tokens: list[int]) -> float:
        """Seconds until this prompt's first token."""
        ...

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Median seconds of a step of all these sequences together, after their prompts."""
        ...


LoadPeer = Callable[[PeerTask], Peer]
"""Type of `load` in each peer's module."""


def rss_mb() -> int:
    """Resident memory of this process now, in 10^6 bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return round(int(fields["VmRSS"].split()[0]) * _KIB / 1e6)
