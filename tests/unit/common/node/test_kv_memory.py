"""Default sizes of KV cache and swap, on a CPU and on an accelerator."""

from dataclasses import replace

import pytest

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.host import HostFacts
from kvferry.common.config.protocol import Limits
from kvferry.common.config.resolve import NodeSettings, resolve_node
from kvferry.common.config.schema import ClusterConfig
from kvferry.common.node.memory import check_piece_bytes, kv_cache_bytes, swap_bytes
from tests.support.paged_device import PagedDevice

FREE = 10_000_000_000
SETTINGS = resolve_node(ClusterConfig(), "decode", HostFacts(cores=4, free_memory_bytes=8 << 30))


class Accelerator(PagedDevice):
    """A device with its own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shares_host_memory = False


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator()


def test_the_cache_takes_the_free_memory_less_the_reserve(accelerator: Accelerator) -> None:
    assert kv_cache_bytes(SETTINGS, accelerator, FREE) == 9_000_000_000
    assert kv_cache_bytes(replace(SETTINGS, device_reserve_share=0.25), accelerator, FREE) == 7_500_000_000
    assert kv_cache_bytes(replace(SETTINGS, kv_cache_bytes=78), accelerator, FREE) == 78
    assert kv_cache_bytes(SETTINGS, PagedDevice(), FREE) == SETTINGS.kv_cache_bytes_on_cpu


def test_ranks_divide_configured_sizes_and_each_fill_their_own_device(accelerator: Accelerator) -> None:
    two = replace(SETTINGS, tensor_parallel=2, max_swap_bytes=300)
    assert kv_cache_bytes(two, accelerator, FREE) == 9_000_000_000
    assert kv_cache_bytes(replace(two, kv_cache_bytes=78), accelerator, FREE) == 39
    assert swap_bytes(two, accelerator, 10_000_000) == 150
    assert swap_bytes(replace(two, swap_bytes=78), accelerator, 10_000_000) == 39


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 1_000_000),
        ({"max_swap_bytes": 300}, 300),
        ({"swap_bytes": 5_000_000, "max_swap_bytes": 300}, 5_000_000),
        ({"swap_bytes": 0}, 0),
    ],
)
def test_swap_is_a_tenth_of_the_cache_within_the_host_limit(
    accelerator: Accelerator, changes: dict[str, int], wanted: int
) -> None:
    settings: NodeSettings = replace(SETTINGS, **changes)  # type: ignore[arg-type]
    assert swap_bytes(settings, accelerator, 10_000_000) == wanted


def test_a_cpu_swaps_only_if_configured() -> None:
    assert swap_bytes(SETTINGS, PagedDevice(), 10_000_000) == 0
    assert swap_bytes(replace(SETTINGS, swap_bytes=5), PagedDevice(), 10_000_000) == 5


def test_a_piece_must_hold_one_token_of_one_layer() -> None:
    limits = Limits(piece_max_bytes=65_536, piece_target_bytes=65_536)
    check_piece_bytes(limits, 65_536)
    with pytest.raises(ConfigError, match="piece_max_bytes"):
        check_piece_bytes(limits, 65_537)
