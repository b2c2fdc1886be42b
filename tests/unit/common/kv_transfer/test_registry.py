"""The registry of KV transports: one line per transport; a made-up one works without any other change."""

import pkgutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from itertools import count
from typing import get_args

import pytest

from kvferry.common import kv_transfer
from kvferry.common.base.errors import ConfigError, InvariantError
from kvferry.common.base.ids import Incarnation, new_incarnation
from kvferry.common.cluster.events import PieceArrived, PieceSent, SessionClosed
from kvferry.common.config.checks import check_config
from kvferry.common.config.docs import section_keys
from kvferry.common.config.host import HostFacts
from kvferry.common.config.protocol import Limits, Timers
from kvferry.common.config.resolve import NodeSettings, resolve_node
from kvferry.common.config.schema import ClusterConfig, KvTransportName, NodeConfig, NodeKind
from kvferry.common.kv.transports import KV_TRANSPORTS, MESSAGE_TRANSPORT
from kvferry.common.kv_transfer.build import make_mover
from kvferry.common.kv_transfer.interface import KvTransport
from kvferry.common.kv_transfer.registry import (
    load_transport,
    num_staging_slots,
    staging_host,
    staging_transport,
    usable_transports,
)
from kvferry.common.transport.context import TransportContext
from tests.support.kv_memory import MemoryCache, Posted, key_between, piece_of
from tests.support.transport import transport_context, wait_until

TABLE, SLOTS = (3, 1, 6), (0, 1)


def settings_of(role: NodeKind, transports: tuple[str, ...], tensor_parallel: int = 1) -> NodeSettings:
    settings = resolve_node(ClusterConfig(), role, HostFacts(1, 1 << 30))
    return replace(
        settings,
        kv_transports=transports,
        staging_slots=len(SLOTS),
        staging_slot_bytes=4096,
        tensor_parallel=tensor_parallel,
    )


# -- a made-up one-sided transport: slots in a dict of this process


_MEMORIES: dict[str, "DictMemory"] = {}
_NUMBERS = count()


class DictMemory:
    """Implements SlotMemory."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.slots = [bytearray(slot_bytes) for _ in range(num_slots)]
        self.address = f"dict://here/{next(_NUMBERS)}"
        self.fenced: set[Incarnation] = set()

    def open(self) -> str:
        _MEMORIES[self.address] = self
        return self.address

    def view(self, slot: int, num_bytes: int) -> memoryview:
        return memoryview(self.slots[slot])[:num_bytes]

    def refuse(self, peer: Incarnation) -> bool:
        self.fenced.add(peer)
        return True

    def close(self) -> None:
        _MEMORIES.pop(self.address, None)


class DictWriter:
    """Implements SlotWriter."""

    def __init__(self, self_id: Incarnation) -> None:
        self.self_id = self_id
        self.opened: dict[Incarnation, DictMemory] = {}

    def open(self, peer: Incarnation, address: str) -> None:
        self.opened[peer] = _MEMORIES[address]

    def fits(self, peer: Incarnation, num_bytes: int) -> bool:
        return peer in self.opened and num_bytes <= self.opened[peer].slot_bytes

    def write(self, peer: Incarnation, slot: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self.opened[peer].slots[slot][: len(view)] = view

    def close(self, peer: Incarnation) -> None:
        self.opened.pop(peer, None)

    def close_all(self) -> None:
        self.opened.clear()


TRANSPORT = KvTransport(
    name="made-up",
    is_one_sided=True,
    is_usable=lambda settings: settings.max_model_len > 0,
    staging_host=lambda: "dict://here/",
    make_memory=DictMemory,
    make_writer=DictWriter,
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KV_TRANSPORTS, "made-up", __name__)


@pytest.fixture
def context() -> Iterator[TransportContext]:
    with transport_context() as made:
        yield made


@pytest.mark.usefixtures("registered")
def test_a_made_up_transport_carries_pieces_between_two_movers(context: TransportContext):
    names, ids = ("made-up", "zmq"), {"prefill": new_incarnation(), "decode": new_incarnation()}
    caches = {"prefill": MemoryCache().fill(1), "decode": MemoryCache()}
    posted = {"prefill": Posted(), "decode": Posted()}

    def mover(role: NodeKind):
        settings = settings_of(role, names)
        return make_mover(
            context,
            ids[role],
            f"inproc://{role}",
            caches[role],
            settings,
            Limits(),
            Timers(),
            lambda: None,
            posted[role],
        )

    with closing(mover("prefill")) as sender, closing(mover("decode")) as receiver:
        sender.start()
        endpoint = receiver.start()
        assert sender.staging_address == "", "only a node that decodes provides slots"
        assert receiver.staging_address.startswith(staging_host(settings_of("prefill", names)))
        sender.open(ids["decode"], endpoint, staging=receiver.staging_address)
        key = key_between(ids["prefill"], ids["decode"])
        receiver.expect(key, TABLE, 2, SLOTS)
        for number in range(4):
            piece = piece_of(caches["prefill"], key, number, layers=(number, number + 1), tokens=(2, 11))
            sender.send(piece, TABLE, SLOTS)
        wait_until(lambda: len(posted["decode"].of(PieceArrived)) == len(posted["prefill"].of(PieceSent)) == 4)
        assert receiver.counts()[1]["staged"] == sender.counts()[0]["staged"] == 4
        assert caches["decode"].read(0, 4, TABLE, 2, 11) == caches["prefill"].read(0, 4, TABLE, 2, 11)
        memory = _MEMORIES[receiver.staging_address]
        receiver.close_session(ids["prefill"])
        wait_until(lambda: posted["decode"].of(SessionClosed))
        assert memory.fenced == {ids["prefill"]}
    assert not _MEMORIES


@pytest.mark.usefixtures("registered")
def test_the_first_usable_one_sided_transport_is_chosen():
    assert staging_transport(settings_of("decode", ("made-up", "shm", "zmq"))) is TRANSPORT
    unusable = replace(settings_of("decode", ("made-up", "shm", "zmq")), max_model_len=0)
    assert [transport.name for transport in usable_transports(unusable)] == ["shm", "zmq"]
    assert staging_transport(unusable) is load_transport("shm")


def test_a_line_for_a_module_of_another_transport_raises(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KV_TRANSPORTS, "other-name", __name__)
    with pytest.raises(InvariantError, match=f"KV transport other-name: {__name__} declares"):
        load_transport("other-name")


# -- the registered transports


def test_every_transport_module_has_its_line():
    modules = [
        import_module(f"{kv_transfer.__name__}.{info.name}") for info in pkgutil.iter_modules(kv_transfer.__path__)
    ]
    declared = {module.TRANSPORT.name: module.__name__ for module in modules if hasattr(module, "TRANSPORT")}
    assert declared == KV_TRANSPORTS


@pytest.mark.parametrize("name", KV_TRANSPORTS)
def test_a_transport_declares_its_ends(name: str):
    transport = load_transport(name)
    assert transport.name == name
    assert (transport.make_memory(1, 64).num_slots == 1) is transport.is_one_sided
    assert bool(transport.staging_host()) is transport.is_one_sided


def test_the_configuration_offers_the_registered_transports():
    assert get_args(KvTransportName) == tuple(KV_TRANSPORTS)
    [key] = [key for key in section_keys("node", NodeConfig) if key.name == "kv_transports"]
    assert key.type == "array, each one of " + ", ".join(f'"{name}"' for name in KV_TRANSPORTS)
    assert all(f"{name}:" in key.text for name in KV_TRANSPORTS), "its text explains each transport"


def test_messages_need_their_transport():
    assert not load_transport(MESSAGE_TRANSPORT).is_one_sided
    with pytest.raises(ConfigError, match=MESSAGE_TRANSPORT):
        check_config(ClusterConfig(node=NodeConfig(kv_transports=("shm",))))


@pytest.mark.parametrize(
    ("role", "configured", "ranks", "usable", "slots"),
    [
        ("decode", ("shm", "zmq"), 1, ["shm", "zmq"], 2),
        ("colocated", ("shm", "zmq"), 1, ["shm", "zmq"], 2),
        ("prefill", ("shm", "zmq"), 1, ["shm", "zmq"], 0),
        ("decode", ("zmq",), 1, ["zmq"], 0),
        ("decode", ("shm", "zmq"), 2, ["zmq"], 0),
    ],
)
def test_what_a_node_uses(role: NodeKind, configured: tuple[str, ...], ranks: int, usable: list[str], slots: int):
    settings = settings_of(role, configured, tensor_parallel=ranks)
    assert [transport.name for transport in usable_transports(settings)] == usable
    assert num_staging_slots(settings) == slots
    assert bool(staging_host(settings)) is ("shm" in usable)
