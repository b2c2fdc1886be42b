"""Models whose cache is not plain keys and values of every position, through router, prefill and decode node."""

from pathlib import Path
from typing import Any

import pytest

from kvferry.common.device.base import Device
from kvferry.common.models.load import load_model
from tests.support.cluster import MODEL, running_cluster
from tests.support.tiny_families import make_family_checkpoint
from tests.support.tiny_llama import random_prompt, reference_tokens

FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "latents": ("deepseek_v3", {}, "latent[16],rope_key[8]"),
    "windows": ("mistral", {"sliding_window": 9}, "key[2,8],value[2,8]"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", FAMILIES)
async def test_transferred_kv_continues_as_in_one_process(name: str, cpu: Device, tmp_path: Path) -> None:
    """The second prompt shares the first one's beginning, which is then in both nodes' prefix caches."""
    family, changes, layout = FAMILIES[name]
    reference = make_family_checkpoint(tmp_path / MODEL, family, **changes)
    loaded = load_model(tmp_path / MODEL, device=cpu, max_model_len=512, model_name=MODEL, progress=False)
    first = random_prompt(3, 45)
    second = first[:30] + random_prompt(4, 20)
    async with running_cluster(loaded, cpu, str(tmp_path)) as cluster:
        for prompt in (first, second):
            assert await cluster.generate(prompt, max_new_tokens=12) == reference_tokens(reference, prompt, 12)
        announced = await cluster.nodes["decode-0"].ask(lambda core: core.identity.compatibility)
        assert announced.kv_layout == layout
