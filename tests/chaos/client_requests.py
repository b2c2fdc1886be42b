"""What clients ask for: a pool of generations whose undisturbed tokens are known, and ways of asking for them."""

import random
from dataclasses import dataclass
from typing import Any

from tests.support.bodies import body_of


@dataclass(frozen=True)
class Generation:
    """A prompt with everything that its tokens depend on."""

    prompt: tuple[int, ...]
    parameters: tuple[tuple[str, Any], ...]
    max_new_tokens: int

    @property
    def is_greedy(self) -> bool:
        return not self.parameters


@dataclass(frozen=True)
class ClientRequest:
    """One request of one client."""

    number: int
    """Of its generation in the pool."""
    priority: int
    streamed: bool
    leaves_after_s: float | None = None
    timeout_s: int | None = None

    def body(self, generation: Generation) -> bytes:
        own: dict[str, Any] = {"timeout": self.timeout_s} if self.timeout_s else {}
        parameters = {**dict(generation.parameters), "max_new_tokens": generation.max_new_tokens, **own}
        return body_of(list(generation.prompt), priority=self.priority, **parameters)


@dataclass(frozen=True)
class Sizes:
    """How long prompts and outputs are."""

    prompts: tuple[int, ...] = (1, 9, 60, 250, 600)
    outputs: tuple[int, ...] = (1, 2, 8, 30, 120, 480)
    shared: int = 96
    """Half of the prompts begin with these many ids alike."""
    vocab_size: int = 512


REAL_SIZES = Sizes(prompts=(1, 9, 60), outputs=(1, 2, 8, 24), shared=32, vocab_size=49152)
"""For the small real model."""


def pool(seed: int, count: int, sizes: Sizes) -> tuple[Generation, ...]:
    """Mixed lengths, greedy and sampled with a seed."""
    rng = random.Random(f"pool-{seed}")
    shared = _ids(rng, sizes.shared, sizes)
    generations = []
    for number in range(count):
        prompt = (*(shared if rng.random() < 0.5 else ()), *_ids(rng, rng.choice(sizes.prompts), sizes))
        parameters: dict[str, Any] = {}
        if rng.random() < 0.5:
            parameters = {"do_sample": True, "seed": number + 1, "temperature": 0.9, "top_p": 0.95}
            if rng.random() < 0.4:
                parameters["repetition_penalty"] = 1.2
        generations.append(Generation(prompt, tuple(parameters.items()), rng.choice(sizes.outputs)))
    return tuple(generations)


def draw(rng: random.Random, count: int) -> ClientRequest:
    """One of `count` generations; a tenth leaves, a few have short deadlines."""
    leaves = rng.random() * 0.8 if rng.random() < 0.1 else None
    timeout = rng.choice((1, 2)) if leaves is None and rng.random() < 0.05 else None
    return ClientRequest(rng.randrange(count), rng.randint(1, 5), rng.random() < 0.6, leaves, timeout)


def patient(number: int, *, streamed: bool = False) -> ClientRequest:
    """A client that waits for the end."""
    return ClientRequest(number, 3, streamed)


def _ids(rng: random.Random, count: int, sizes: Sizes) -> tuple[int, ...]:
    return tuple(rng.randrange(sizes.vocab_size) for _ in range(count))
