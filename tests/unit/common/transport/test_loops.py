"""Poll loop, waker and inbox of a control thread; receiving in asyncio and uvloop."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import uvloop

from kvferry.common.base.errors import InvariantError
from kvferry.common.base.ids import new_incarnation
from kvferry.common.protocol.wire import Frame
from kvferry.common.transport.async_receiver import BATCH, AsyncReceiver
from kvferry.common.transport.context import TransportContext
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.monitor import ConnectionEvent, LinkMonitor
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.nonblocking import SendResult
from kvferry.common.transport.options import SocketOptions
from kvferry.common.transport.poll_loop import PollLoop
from kvferry.common.transport.waker import Inbox, Waker
from tests.support.transport import DEADLINE_S, nothing_left, take_one, transport_context, wait_until

OPTIONS = SocketOptions()
TIGHT = SocketOptions(high_water=2, outbox_messages=1000)


@pytest.fixture(scope="module", autouse=True)
def _uvloop_has_been_used() -> None:
    """The first uvloop opens descriptors that stay open in the process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop):
        pass


@pytest.fixture
def context() -> Iterator[TransportContext]:
    with transport_context() as made:
        yield made


@pytest.fixture
def waker() -> Iterator[Waker]:
    made = Waker()
    made.open()
    yield made
    made.close()


def connected(context: TransportContext, options: SocketOptions = OPTIONS) -> tuple[NodeSocket, LinkSocket]:
    node = NodeSocket(context, options)
    bound = node.bind("tcp://127.0.0.1:0")
    link = LinkSocket(context, new_incarnation(), options)
    link.open()
    link.connect(bound)
    return node, link


def test_repeated_set_wakes_the_loop_once(waker: Waker):
    loop = PollLoop()
    woken: list[None] = []

    def on_ready() -> None:
        waker.clear()
        woken.append(None)

    loop.add(waker, on_ready)
    for _ in range(100_000):  # more than the descriptor's buffer would take
        waker.set()
    assert loop.run_once(DEADLINE_S) == 1
    assert loop.run_once(0) == 0
    assert len(woken) == 1


def test_a_set_before_open_wakes_the_loop():
    waker = Waker()
    waker.set()
    waker.open()
    loop = PollLoop()
    loop.add(waker, waker.clear)
    assert loop.run_once(DEADLINE_S) == 1
    loop.remove(waker)
    waker.close()
    waker.close()
    waker.set()
    waker.clear()


def test_an_inbox_loses_no_item(waker: Waker):
    inbox: Inbox[tuple[int, int]] = Inbox(waker)
    loop = PollLoop()
    got: list[tuple[int, int]] = []
    loop.add(waker, lambda: got.extend(inbox.take_all()))

    def fill(name: int) -> None:
        for number in range(1000):
            inbox.put((name, number))

    threads = [threading.Thread(target=fill, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    while len(got) < 3000:
        assert loop.run_once(DEADLINE_S) == 1, "items were put in, but the loop was not woken"
    for thread in threads:
        thread.join()
    for name in range(3):
        assert [number for who, number in got if who == name] == list(range(1000))
    assert len(inbox) == 0


def test_a_signal_handler_may_wake_the_loop(waker: Waker):
    loop = PollLoop()
    loop.add(waker, waker.clear)
    before = signal.signal(signal.SIGUSR1, lambda *_: waker.set())
    try:
        signal.raise_signal(signal.SIGUSR1)
        assert loop.run_once(DEADLINE_S) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_loop_serves_node_link_and_waker(context: TransportContext, waker: Waker):
    node, link = connected(context)
    loop = PollLoop()
    called: list[str] = []

    def echo() -> None:
        for peer, frames in node.receive():
            called.append("node")
            node.send(peer, frames)

    def listen() -> None:
        called.extend("link" for _ in link.receive())
        waker.set()

    def woken() -> None:
        waker.clear()
        called.append("waker")

    loop.add(node, echo)
    loop.add(link, listen)
    loop.add(waker, woken)
    link.send([b"x"])
    wait_until(lambda: called == ["node", "link", "waker"], step=lambda: (link.flush(), loop.run_once(0.01)))
    for source in (node, link, waker):
        loop.remove(source)
    assert len(loop) == 0
    link.close()
    node.close()


def test_a_source_may_be_removed_by_another_callback_of_the_same_round():
    first, second = Waker(), Waker()
    for waker in (first, second):
        waker.open()
        waker.set()
    loop = PollLoop()
    called: list[str] = []

    def on_ready(name: str, other: Waker) -> Callable[[], None]:
        def run() -> None:
            called.append(name)
            loop.remove(other)

        return run

    loop.add(first, on_ready("first", second))
    loop.add(second, on_ready("second", first))
    assert loop.run_once(DEADLINE_S) == 2
    assert len(called) == 1
    first.close()
    second.close()


def test_a_source_is_watched_once(waker: Waker):
    loop = PollLoop()
    loop.add(waker, waker.clear)
    with pytest.raises(InvariantError):
        loop.add(waker, waker.clear)


def test_watch_writable_reports_when_a_full_link_has_room_again(context: TransportContext):
    node, link = connected(context, TIGHT)
    link.send([b"hello"])
    take_one(node.receive, step=link.flush)
    while link.send([b"x" * 100_000]) is not SendResult.QUEUED:
        pass
    loop = PollLoop()
    loop.add(link, link.flush)
    loop.watch_writable(link, True)
    wait_until(lambda: not link.has_pending, step=lambda: (list(node.receive()), loop.run_once(0.01)))
    loop.watch_writable(link, False)
    assert loop.run_once(0) == 0
    link.close()
    node.close()


LOOPS = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def run_in(make_loop: Callable[[], asyncio.AbstractEventLoop], main: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(main(), DEADLINE_S))  # type: ignore[arg-type]


@LOOPS
def test_async_round_trips_with_sends_between(
    context: TransportContext, make_loop: Callable[[], asyncio.AbstractEventLoop]
):
    """Each answer triggers sends, which consume the descriptor's signal: no message may remain unread."""
    rounds, burst = 200, 5
    node, link = connected(context)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            node.poll_handle.poll(10)
            for peer, frames in node.receive():
                node.send(peer, frames)

    server = threading.Thread(target=serve)
    server.start()

    async def main() -> None:
        done = asyncio.get_running_loop().create_future()
        got: list[bytes] = []

        def on_message(frames: list[Frame]) -> None:
            got.append(bytes(frames[0]))
            if len(got) == rounds * burst:
                done.set_result(None)
            elif len(got) % burst == 0:
                send_burst()

        def send_burst() -> None:
            for offset in range(burst):
                link.send([b"%d" % (len(got) + offset)])

        receiver = AsyncReceiver(asyncio.get_running_loop(), link, on_message)
        receiver.open()
        send_burst()
        await done
        assert got == [b"%d" % number for number in range(rounds * burst)]
        receiver.close()
        receiver.close()

    run_in(make_loop, main)
    stop.set()
    server.join()
    link.close()
    node.close()


@LOOPS
def test_async_receives_more_than_a_batch_and_what_arrived_before_open(
    context: TransportContext, make_loop: Callable[[], asyncio.AbstractEventLoop]
):
    node, link = connected(context)
    link.send([b"hello"])
    peer, _ = take_one(node.receive, step=link.flush)
    total = 3 * BATCH + 1
    for number in range(total):
        assert node.send(peer, [b"%d" % number]) is SendResult.SENT

    async def main() -> None:
        done = asyncio.get_running_loop().create_future()
        got: list[int] = []

        def on_message(frames: list[Frame]) -> None:
            got.append(int(bytes(frames[0])))
            if len(got) == total:
                done.set_result(None)

        receiver = AsyncReceiver(asyncio.get_running_loop(), link, on_message)
        receiver.open()
        await done
        assert got == list(range(total))
        receiver.close()

    run_in(make_loop, main)
    link.close()
    node.close()


@LOOPS
def test_async_continues_after_a_callback_raised_and_stops_when_closed_by_one(
    context: TransportContext, make_loop: Callable[[], asyncio.AbstractEventLoop]
):
    node, link = connected(context)
    link.send([b"hello"])
    peer, _ = take_one(node.receive, step=link.flush)
    for text in (b"bad", b"good", b"last", b"too late"):
        node.send(peer, [text])

    async def main() -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        raised: list[object] = []
        got: list[bytes] = []
        loop.set_exception_handler(lambda _, details: raised.append(details["exception"]))

        def on_message(frames: list[Frame]) -> None:
            got.append(bytes(frames[0]))
            if got[-1] == b"bad":
                raise ValueError("bad")
            if got[-1] == b"last":
                receiver.close()
                done.set_result(None)

        receiver = AsyncReceiver(loop, link, on_message)
        receiver.open()
        await done
        await asyncio.wait_for(loop.run_in_executor(None, lambda: None), DEADLINE_S)  # one iteration of the loop
        assert got == [b"bad", b"good", b"last"]
        assert [type(error) for error in raised] == [ValueError]

    run_in(make_loop, main)
    link.close()
    node.close()


@LOOPS
def test_async_flushes_a_full_link_and_receives_monitor_events(
    context: TransportContext, make_loop: Callable[[], asyncio.AbstractEventLoop]
):
    """Only the descriptor signals that the connection is up: this test has no timer."""
    node = NodeSocket(context, OPTIONS)
    bound = node.bind("tcp://127.0.0.1:0")
    link = LinkSocket(context, new_incarnation(), TIGHT)
    monitor = LinkMonitor(context, link)
    link.open()
    monitor.open()
    link.connect(bound)
    stop = threading.Event()
    received: list[bytes] = []

    def serve() -> None:
        while not stop.is_set():
            node.poll_handle.poll(10)
            for peer, frames in node.receive():
                received.append(bytes(frames[0][:4]))
                node.send(peer, [b"%d" % len(received)])

    server = threading.Thread(target=serve)
    server.start()
    total = 50

    async def main() -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        events: list[ConnectionEvent] = []

        def on_message(frames: list[Frame]) -> None:
            if frames[0] == b"%d" % total:
                done.set_result(None)

        receiver = AsyncReceiver(loop, link, on_message)
        watcher = AsyncReceiver(loop, monitor, events.append)
        receiver.open()
        watcher.open()
        for number in range(total):
            assert link.send([number.to_bytes(4, "little") + b"x" * 50_000]) is not SendResult.UNREACHABLE
        await done
        assert events == [ConnectionEvent.CONNECTED]
        watcher.close()
        receiver.close()

    run_in(make_loop, main)
    stop.set()
    server.join()
    assert received == [number.to_bytes(4, "little") for number in range(total)]
    monitor.close()
    link.close()
    node.close()


def test_contexts_links_and_wakers_leave_no_descriptor_behind():
    with nothing_left():
        for _ in range(5):
            with transport_context() as context:
                node, link = connected(context)
                waker = Waker()
                waker.open()
                link.send([b"x"])
                take_one(node.receive, step=link.flush)
                waker.close()
                link.close()
                node.close()
