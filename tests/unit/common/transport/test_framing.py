"""A message from a node to a client is one frame, whatever the number of its parts."""

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.base.ids import new_incarnation, routing_id
from kvferry.common.transport.framing import OVERHEAD_BYTES, pack, unpack
from kvferry.common.transport.link_socket import LinkSocket
from kvferry.common.transport.node_socket import NodeSocket
from kvferry.common.transport.options import SocketOptions
from tests.support.transport import take_one, transport_context, wait_until


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_unpack_inverts_pack(frames: list[bytes]) -> None:
    assert unpack(pack(frames)) == frames
    assert unpack(memoryview(pack([memoryview(frame) for frame in frames]))) == frames
    assert len(pack(frames)) <= sum(map(len, frames)) + OVERHEAD_BYTES


@given(st.binary(max_size=40))
def test_any_bytes_are_unpacked_or_refused(packed: bytes) -> None:
    try:
        frames = unpack(packed)
    except ValueError:
        return
    assert pack(frames) == packed


@pytest.mark.parametrize("packed", [b"\x01", b"\x02\0\0\0a", b"\x01\0\0\0ab\0", b"\xff\xff\xff\xff"])
def test_truncated_bytes_are_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="bytes"):
        unpack(packed)


@pytest.mark.rule(8)
def test_no_message_to_a_client_has_a_second_frame() -> None:
    """libzmq aborts a client's process when its connection is re-established between two frames."""
    with transport_context() as context:
        node, self_id = NodeSocket(context, SocketOptions()), new_incarnation()
        client = context.open_socket(zmq.DEALER, "client")
        client.setsockopt(zmq.ROUTING_ID, routing_id(self_id))
        client.connect(node.bind("tcp://127.0.0.1:*"))
        client.send(b"hello")
        take_one(node.receive)
        node.send(self_id, [b"type", b"header", b"ids"])
        wait_until(lambda: client.poll(0))
        assert [unpack(frame) for frame in client.recv_multipart()] == [[b"type", b"header", b"ids"]]
        context.close_socket(client)
        node.close()


def test_a_frame_that_cannot_be_unpacked_is_a_message_without_frames() -> None:
    with transport_context() as context:
        node = context.open_socket(zmq.ROUTER, "a node of another kind")
        port = node.bind_to_random_port("tcp://127.0.0.1")
        link = LinkSocket(context, new_incarnation(), SocketOptions())
        link.open()
        link.connect(f"tcp://127.0.0.1:{port}")
        wait_until(lambda: link.try_send([b"hello"]))
        wait_until(lambda: node.poll(0))
        peer, _ = node.recv_multipart()
        node.send_multipart([peer, b"\xff\xff\xff\xff"])
        assert take_one(link.receive) == []
        context.close_socket(node)
        link.close()
