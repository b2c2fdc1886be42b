"""How many nodes are up is told at intervals while a cluster starts."""

import asyncio
from collections.abc import Iterator

from kvferry.common.base.ids import new_incarnation
from kvferry.common.protocol.messages import Announce, Envelope
from kvferry.ops.launcher.progress import LOOKS_PER_LINE, tell_progress

NAMES = frozenset(("prefill-0", "decode-0", "decode-1"))


class Heard:
    """What is announced at each look."""

    def __init__(self, *looks: tuple[str, ...]) -> None:
        self._looks = list(looks)

    def receive(self) -> Iterator[Envelope]:
        for name in self._looks.pop(0) if self._looks else ():
            self_id = new_incarnation()
            yield Envelope(self_id, self_id, Announce(name=name, role="decode", model="m", endpoint="inproc://a"))


class TooLongError(Exception):
    """The test has seen enough."""


def told(heard: Heard, pauses: int) -> list[str]:
    lines: list[str] = []
    left = iter(range(pauses))

    async def pause() -> None:
        if next(left, None) is None:
            raise TooLongError

    async def story() -> None:
        try:
            await tell_progress(heard, NAMES, lines.append, pause)
        except TooLongError:
            return

    asyncio.run(story())
    return lines


def test_a_cluster_that_is_up_soon_is_not_spoken_of():
    assert told(Heard(("prefill-0",)), LOOKS_PER_LINE - 1) == []


def test_nodes_count_once_and_strangers_not_at_all():
    heard = Heard(("decode-0", "decode-0", "another"), ("decode-0",), *[()] * (LOOKS_PER_LINE - 2), ("prefill-0",))
    assert told(heard, 2 * LOOKS_PER_LINE) == ["1 of 3 nodes ready", "2 of 3 nodes ready"]
