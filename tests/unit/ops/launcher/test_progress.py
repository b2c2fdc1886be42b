"""Reports of the nodes that are up while a cluster starts."""

import asyncio
from collections.abc import Iterator

from kvferry.common.base.ids import new_incarnation
from kvferry.common.protocol.messages import Announce, Envelope
from kvferry.ops.launcher.progress import LOOKS_PER_LINE, report_progress

NAMES = frozenset(("prefill-0", "decode-0", "decode-1"))


class FakeAnnouncements:
    """Names that are announced before each call of `receive`."""

    def __init__(self, *looks: tuple[str, ...]) -> None:
        self._looks = list(looks)

    def receive(self) -> Iterator[Envelope]:
        for name in self._looks.pop(0) if self._looks else ():
            self_id = new_incarnation()
            yield Envelope(self_id, self_id, Announce(name=name, role="decode", model="m", endpoint="inproc://a"))


class TooLongError(Exception):
    """Ends an endless report."""


def reported(source: FakeAnnouncements, pauses: int) -> list[str]:
    lines: list[str] = []
    left = iter(range(pauses))

    async def pause() -> None:
        if next(left, None) is None:
            raise TooLongError

    async def story() -> None:
        try:
            await report_progress(source, NAMES, lines.append, pause)
        except TooLongError:
            return

    asyncio.run(story())
    return lines


def test_a_cluster_that_starts_quickly_is_not_reported():
    assert reported(FakeAnnouncements(("prefill-0",)), LOOKS_PER_LINE - 1) == []


def test_each_node_of_the_cluster_counts_once():
    rest = [()] * (LOOKS_PER_LINE - 2)
    source = FakeAnnouncements(("decode-0", "decode-0", "another"), ("decode-0",), *rest, ("prefill-0",))
    assert reported(source, 2 * LOOKS_PER_LINE) == ["1 of 3 nodes ready", "2 of 3 nodes ready"]
