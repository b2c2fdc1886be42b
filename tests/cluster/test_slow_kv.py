"""A KV thread that stands still for long: its pieces are asked for, are waited for, and go out once each."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.common.base.ids import TransferKey
from kvferry.common.cluster.node_core import NodeCore
from kvferry.common.config.protocol import Limits
from kvferry.common.kv_transfer.send_queue import OutboundPiece
from kvferry.common.protocol.messages import Piece
from kvferry.decode_node.role import DecodeRole
from tests.cluster.conftest import MakeCluster
from tests.support.eventually import PATIENCE_S
from tests.support.timers import PATIENT
from tests.support.tiny_llama import random_prompt, reference_tokens

Reference = tuple[Path, Any]


PIECE_IDLE_S = 1.0


def has_waited_long(core: NodeCore) -> bool:
    """Whether the decode node has asked for pieces, and was asked to wait, more than once."""
    entries = [entry for role in core.roles if isinstance(role, DecodeRole) for entry in role.entries]
    return any(
        e.ledger is not None and e.ledger.last_arrival - e.sequence.accepted_at > 2.5 * PIECE_IDLE_S for e in entries
    )


@pytest.mark.asyncio
async def test_pieces_that_wait_at_their_sender_are_waited_for_and_go_out_once(
    cluster: MakeCluster, reference: Reference
) -> None:
    prompt, limits = random_prompt(9, 40), Limits(piece_target_bytes=2048)
    async with cluster(timers=replace(PATIENT, piece_idle_timeout_s=PIECE_IDLE_S), limits=limits) as c:
        sender = c.nodes["prefill-0"].shell._kv._sender  # type: ignore[attr-defined]
        gate, read, reads = threading.Event(), sender._read, list[tuple[TransferKey, int]]()

        def read_late(outgoing: OutboundPiece) -> Piece:
            assert gate.wait(PATIENCE_S)
            reads.append((outgoing.piece.key, outgoing.piece.number))
            piece: Piece = read(outgoing)
            return piece

        sender._read = read_late
        try:
            answer = asyncio.create_task(c.generate(prompt, max_new_tokens=6))
            await c.until(c.nodes["decode-0"], has_waited_long, "waits on")
        finally:
            gate.set()
        assert await answer == reference_tokens(reference[1], prompt, 6)
        assert len({key for key, _ in reads}) == 1
        assert len(reads) > 1
        assert sorted(reads) == sorted(set(reads))
