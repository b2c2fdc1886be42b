"""A socket that is read while its connection is made anew, again and again. In a process of its own: libzmq aborts."""

import errno
import subprocess
import sys
import threading
import time

import zmq

from common.transport import nowait

LIVES = 60
MESSAGES = 2000


def _bind(router: "zmq.Socket[bytes]", ports: list[int]) -> None:
    if not ports:
        ports.append(router.bind_to_random_port("tcp://127.0.0.1"))
        return
    while True:
        try:
            router.bind(f"tcp://127.0.0.1:{ports[0]}")
            return
        except zmq.ZMQError as error:  # the one before is closed by another thread, a moment later
            if error.errno != errno.EADDRINUSE:
                raise
            time.sleep(0.001)


def _serve(context: "zmq.Context[zmq.Socket[bytes]]", ports: list[int]) -> None:
    """Lives of a node at one address; each sends a burst of messages and ends before all are taken."""
    for _ in range(LIVES):
        router = context.socket(zmq.ROUTER)
        router.linger, router.sndhwm = 0, 0
        _bind(router, ports)
        if router.poll(2000):
            peer, _ = router.recv_multipart()
            for _ in range(MESSAGES):
                router.send_multipart([peer, b"type", b"header", b"ids"])
            time.sleep(0.01)
        router.close()


def _read(context: "zmq.Context[zmq.Socket[bytes]]", ports: list[int], server: threading.Thread) -> int:
    dealer = context.socket(zmq.DEALER)
    dealer.immediate, dealer.linger, dealer.reconnect_ivl, dealer.rcvhwm = 1, 0, 1, 0
    while not ports:
        time.sleep(0.001)
    dealer.connect(f"tcp://127.0.0.1:{ports[0]}")
    count = 0
    while server.is_alive():
        nowait.send(dealer, [b"hello"])
        for frames in nowait.receive(dealer, 128):
            assert frames == [b"type", b"header", b"ids"]
            count += 1
            time.sleep(0)  # the other threads go on meanwhile, as they do while a message is handled
    dealer.close()
    return count


def main() -> None:
    context = zmq.Context()
    ports: list[int] = []
    server = threading.Thread(target=_serve, args=(context, ports))
    server.start()
    assert _read(context, ports, server) > MESSAGES
    server.join()
    context.term()


def test_connection_made_anew_between_two_frames() -> None:
    done = subprocess.run((sys.executable, "-m", __name__), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main()
