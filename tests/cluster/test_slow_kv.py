"""A KV thread that stands still for longer than its peer waits for pieces: they are asked for, and go out once each."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from common.config.protocol import Limits
from common.ids import TransferKey
from common.kv_transfer.send_queue import Outgoing
from common.protocol.messages import Piece
from common.state.node_core import NodeCore
from decode_node.core.leg import DecodeLeg
from tests.cluster.conftest import MakeCluster
from tests.support.eventually import PATIENCE_S
from tests.support.timers import PATIENT
from tests.support.tiny_llama import random_prompt, reference_tokens

Reference = tuple[Path, Any]


def has_asked_again(core: NodeCore) -> bool:
    """Whether the decode node has asked for pieces that did not come."""
    legs = [leg for leg in core.legs if isinstance(leg, DecodeLeg)]
    return any(entry.ledger is not None and entry.ledger.asked for leg in legs for entry in leg.entries)


@pytest.mark.asyncio
async def test_pieces_that_still_wait_when_they_are_asked_for_go_out_once(
    cluster: MakeCluster, reference: Reference
) -> None:
    prompt, limits = random_prompt(9, 40), Limits(piece_target_bytes=2048)
    async with cluster(timers=replace(PATIENT, piece_idle_s=1.0), limits=limits) as c:
        sender = c.nodes["prefill-0"].shell._kv._sender  # type: ignore[attr-defined]
        gate, read, reads = threading.Event(), sender._read, list[tuple[TransferKey, int]]()

        def read_late(outgoing: Outgoing) -> Piece:
            assert gate.wait(PATIENCE_S)
            reads.append((outgoing.piece.key, outgoing.piece.number))
            piece: Piece = read(outgoing)
            return piece

        sender._read = read_late
        try:
            answer = asyncio.create_task(c.generate(prompt, max_new_tokens=6))
            await c.until(c.nodes["decode-0"], has_asked_again, "asks again")
        finally:
            gate.set()
        assert await answer == reference_tokens(reference[1], prompt, 6)
        assert len(reads) > 1
        assert sorted(reads) == sorted(set(reads))
