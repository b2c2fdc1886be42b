"""What a peer's process is told and what it tells back. Standard library only: it runs in the peer's interpreter."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

_KIB = 1024


@dataclass(frozen=True)
class PeerTask:
    """The cases to be measured, the same for every peer."""

    model: str
    """A HuggingFace directory or a GGUF file."""
    dtype: str
    """bfloat16 or float32, of weights and computing."""
    threads: int
    prompts: list[int]
    batches: list[int]
    context: int
    decode_steps: int
    rounds: int
    vocab_size: int
    seed: int = 1

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PeerTask":
        """What `to_json` gave."""
        return cls(**json.loads(text))

    @property
    def prompt_room(self) -> int:
        """Tokens that the longest prompt and its one token take."""
        return max([*self.prompts, 0]) + 1

    @property
    def decode_room(self) -> int:
        """Tokens that a sequence of the decode cases takes, with room for steps that are not timed."""
        return self.context + 2 * self.decode_steps + max([*self.batches, 0])


@dataclass(frozen=True)
class PeerTimes:
    """Median seconds of each case."""

    version: str
    ready_s: float
    """From the start of the process until the model was loaded."""
    rss_mb: int
    prefill: dict[str, float]
    """Of a whole prompt to its first token, by the prompt's length."""
    decode: dict[str, float]
    """Of a step that gives each sequence one token, by the number of sequences."""


class Peer(Protocol):
    """One peer, loaded."""

    version: str

    def prompt(self, tokens: list[int]) -> float:
        """Seconds until this prompt's first token."""
        ...

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Median seconds of a step of all these sequences at once, after their prompts."""
        ...


LoadPeer = Callable[[PeerTask], Peer]
"""What each peer's module has as `load`."""


def rss_mb() -> int:
    """Of this process now, in 10^6 bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return round(int(fields["VmRSS"].split()[0]) * _KIB / 1e6)
