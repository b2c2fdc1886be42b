"""A whole cluster with keys on every socket: requests, a death and a return, and nothing left at the end."""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import MakeCluster
from tests.support.cluster import tokens_of
from tests.support.eventually import eventually
from tests.support.timers import FAST
from tests.support.tiny_llama import random_prompt, reference_tokens

Reference = tuple[Path, Any]


@pytest.mark.rule(38)
@pytest.mark.asyncio
@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
async def test_nodes_with_keys_die_and_come_back(cluster: MakeCluster, reference: Reference, scheme: str) -> None:
    prompt = random_prompt(3, 25)
    async with cluster(scheme=scheme, keys=True, timers=FAST) as c:
        assert await c.generate(prompt, max_new_tokens=6) == reference_tokens(reference[1], prompt, 6)
        for name in ("decode-0", "prefill-0"):
            old = c.kill(name)
            assert "?key=" in old.shell.endpoint
            await eventually(lambda: c.service.not_ready_reason("tiny") is not None, f"{name} is missed")
            c.add_node(name, old.role, bind=old.shell.endpoint)
            await eventually(lambda: c.service.not_ready_reason("tiny") is None, f"{name} is back")
            events = await c.stream(prompt, max_new_tokens=6)
            assert tokens_of(events) == reference_tokens(reference[1], prompt, 6)
