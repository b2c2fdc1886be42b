"""Peers whose messages are well formed and make no sense are answered; no node and no request is the worse for it."""

from array import array
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.base.ids import TransferKey, new_request_id
from kvferry.common.protocol.messages import Commit, Gone, Granted, HandoverFailed, Job, Refused, Reserve
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.common.protocol.sampling_params import SamplingParams
from tests.cluster.conftest import MakeCluster
from tests.support.cluster import Cluster
from tests.support.tiny_llama import BASE, random_prompt, reference_tokens
from tests.support.unauthenticated_peer import NUMBER, UnauthenticatedPeer

Reference = tuple[Path, Any]
VOCAB = int(BASE["vocab_size"])
PROMPT = random_prompt(8, 24)


async def still_serves(c: Cluster, reference: Reference) -> None:
    """By the same node lives as before."""
    assert await c.generate(PROMPT, max_new_tokens=6) == reference_tokens(reference[1], PROMPT, 6)
    assert all(node.thread.is_alive() for node in c.nodes.values())
    assert c.dead == []


@pytest.mark.asyncio
@pytest.mark.parametrize("kinds", [{}, {"prefill": 0, "decode": 0, "colocated": 1}])
@pytest.mark.parametrize(("prompt", "output"), [([1, VOCAB], []), ([1], [2**32 - 1])])
async def test_a_job_with_ids_outside_the_vocabulary(
    cluster: MakeCluster, reference: Reference, kinds: dict[str, int], prompt: list[int], output: list[int]
) -> None:
    async with cluster(**kinds) as c:
        peer = UnauthenticatedPeer(c.context, "worker")
        await peer.meet(next(node for node in c.nodes.values() if node.role != "decode").shell.endpoint)
        job = Job(
            request_id=new_request_id(),
            attempt=1,
            placement_no=NUMBER,
            spec=RequestSpec(
                model="tiny",
                prompt_token_ids=array("I", prompt),
                output_token_ids=array("I", output),
                sampling=SamplingParams(max_new_tokens=4, repetition_penalty=1.5),
                priority=3,
            ),
            remaining_ms=10_000,
            waited_ms=0,
            candidates=(),
        )
        peer.say(job)
        answer = await peer.hear(HandoverFailed)
        assert isinstance(answer, HandoverFailed)
        assert (answer.reason, answer.retryable) == ("invalid", False)
        assert "outside the vocabulary" in answer.detail
        await still_serves(c, reference)
        await peer.leave()


@pytest.mark.asyncio
async def test_a_reservation_or_commit_with_an_id_outside_the_vocabulary(
    cluster: MakeCluster, reference: Reference
) -> None:
    async with cluster() as c:
        await c.generate(PROMPT, max_new_tokens=6)  # all of it is cached at the decode node: no KV needs to come
        node = c.nodes["decode-0"]
        compatibility = await node.ask(lambda core: core.identity.compatibility)
        worker, prefill = (
            UnauthenticatedPeer(c.context, "worker"),
            UnauthenticatedPeer(c.context, "prefill", compatibility),
        )
        for peer in (worker, prefill):
            await peer.meet(node.shell.endpoint)
            peer.send_heartbeat()

        def reserve(prompt: list[int]) -> Reserve:
            return Reserve(
                key=TransferKey(new_request_id(), 1, 1, prefill.incarnation, prefill.peer),
                transfer_no=NUMBER,
                placement_no=NUMBER,
                worker=worker.incarnation,
                spec=RequestSpec(
                    model="m",
                    prompt_token_ids=array("I", prompt),
                    output_token_ids=array("I"),
                    sampling=SamplingParams(max_new_tokens=4),
                    priority=3,
                ),
                remaining_ms=10_000,
                waited_ms=0,
            )

        prefill.say(reserve([1, VOCAB]))
        refused = await prefill.hear(Refused)
        assert isinstance(refused, Refused)
        assert "outside the vocabulary" in refused.reason
        wanted = reserve(PROMPT)
        prefill.say(wanted)
        granted = await prefill.hear(Granted)
        assert isinstance(granted, Granted)
        assert granted.first_token == len(PROMPT)
        prefill.say(
            Commit(
                key=wanted.key,
                num_pieces=0,
                first_token_pos=len(PROMPT),
                num_tokens=len(PROMPT),
                token_id=VOCAB,
            )
        )
        gone = await worker.hear(Gone)
        assert isinstance(gone, Gone)
        assert "outside the vocabulary" in gone.detail
        await still_serves(c, reference)
        await prefill.leave()
        await worker.leave()
