"""The packed weight file: written once, mapped by later loads, never visible half-written, and never fatal."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.native.select import probe_native
from kvferry.common.models import load, packed_store
from kvferry.common.models.load import DtypeName, LoadedModel, load_model
from kvferry.common.models.packed_store import KEPT_FILES, open_store
from kvferry.common.models.weights import Part
from kvferry.common.models.weights_hf import HfWeights
from tests.support.engine_driver import EngineDriver
from tests.support.eventually import PATIENCE_S
from tests.support.tiny_llama import make_checkpoint, random_prompt
from tests.support.transport import num_fds

PATTERN = torch.arange(10_000, dtype=torch.int64).remainder(251).to(torch.uint8)


def fill(path: Path, names: tuple[str, ...] = ("a", "b")) -> list[Tensor]:
    """Take memory from the store and fill it; `filled()` reports which entries were already filled."""
    with open_store(path) as store:
        taken = [store.take(name, len(PATTERN)) for name in names]
        for memory, is_filled in taken:
            if not is_filled:
                memory.copy_(PATTERN)
    fill.filled = [is_filled for _, is_filled in taken]  # type: ignore[attr-defined]
    return [memory for memory, _ in taken]


def filled() -> list[bool]:
    result: list[bool] = fill.filled  # type: ignore[attr-defined]
    return result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "dir" / "x.kvpacked"


def test_a_second_load_maps_what_the_first_packed(path: Path) -> None:
    first = fill(path)
    assert filled() == [False, False]
    second = fill(path)
    assert filled() == [True, True]
    for memory in (*first, *second):
        assert torch.equal(memory, PATTERN)
        assert memory.data_ptr() % 4096 == 0
    assert {file.name for file in path.parent.iterdir()} == {"x.kvpacked", "x.lock"}


def test_entries_of_another_name_or_size_are_not_reused(path: Path) -> None:
    fill(path)
    with open_store(path) as store:
        assert store.take("a", 17)[1] is False
        assert store.take("c", len(PATTERN))[1] is False
        assert store.take("b", len(PATTERN))[1] is True


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign"])
def test_a_damaged_file_is_written_again(path: Path, damage: str) -> None:
    fill(path)
    data = bytearray(path.read_bytes())
    if damage == "changed":
        data[5] ^= 1
    path.write_bytes(bytes({"cut": data[:-3], "changed": data, "empty": b"", "foreign": b"x" * 100}[damage]))
    memories = fill(path)
    assert filled() == [False, False]
    assert all(torch.equal(memory, PATTERN) for memory in memories)
    fill(path)
    assert filled() == [True, True]


def test_a_failed_load_leaves_no_file(path: Path) -> None:
    def load() -> None:
        with open_store(path) as store:
            store.take("a", 100)
            raise ModelLoadError("no")

    with pytest.raises(ModelLoadError):
        load()
    assert {file.name for file in path.parent.iterdir()} == {"x.lock"}


def test_a_full_disk_is_detected_before_the_memory_is_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate
    calls = []

    def full(fd: int, start: int, count: int) -> None:
        calls.append(start)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "no room")
        real(fd, start, count)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(packed_store, "MAP_BYTES", 1)
    memories = fill(path, ("a", "b", "c"))
    assert len(calls) == 2
    assert all(torch.equal(memory, PATTERN) for memory in memories)
    assert {file.name for file in path.parent.iterdir()} == {"x.lock"}


def test_many_entries_need_one_file_descriptor(path: Path) -> None:
    before = num_fds()
    first = fill(path, tuple(f"part {number}" for number in range(40)))
    assert num_fds() <= before + 1
    assert path.stat().st_size < 41 * 12_288
    second = fill(path, tuple(f"part {number}" for number in range(40)))
    assert all(filled())
    assert all(torch.equal(memory, PATTERN) for memory in (*first, *second))


def test_an_empty_store_leaves_no_file(path: Path) -> None:
    fill(path, ())
    assert not path.exists()


def test_a_directory_that_cannot_be_written_does_not_fail_the_load(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert all(torch.equal(memory, PATTERN) for memory in fill(tmp_path / "file" / "x.kvpacked"))


def test_a_concurrent_load_waits_and_then_maps(path: Path) -> None:
    opened, results = threading.Event(), []

    def second() -> None:
        opened.set()
        with open_store(path) as store:
            results.append(store.take("a", len(PATTERN)))

    with open_store(path) as store:
        thread = threading.Thread(target=second)
        thread.start()
        assert opened.wait(PATIENCE_S)
        memory, is_filled = store.take("a", len(PATTERN))
        assert not is_filled
        memory.copy_(PATTERN)
        assert results == []
    thread.join(PATIENCE_S)
    ((memory, is_filled),) = results
    assert is_filled
    assert torch.equal(memory, PATTERN)


def test_a_load_that_waits_too_long_packs_into_its_own_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_store, "WAIT_S", 0.05)
    with open_store(path) as first:
        first.take("a", 5)
        with open_store(path) as second:
            assert second.take("a", 5)[1] is False
        assert not path.exists()
    assert path.exists()


def test_old_files_are_removed(path: Path) -> None:
    names = [path.with_name(f"{index}.kvpacked") for index in range(KEPT_FILES + 2)]
    for index, name in enumerate(names):
        fill(name)
        os.utime(name, (1000 + index, 1000 + index))
    fill(names[0])
    fill(path)
    left = {file.name for file in path.parent.glob("*.kvpacked")}
    assert len(left) == KEPT_FILES
    assert {"x.kvpacked", f"{KEPT_FILES + 1}.kvpacked"} <= left


def tokens_of(loaded: LoadedModel, device: CpuDevice) -> list[int]:
    driver = EngineDriver(loaded, device)
    sequence = driver.add(random_prompt(1, 30))
    driver.generate([sequence], 12)
    return sequence.output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
def test_a_model_from_packed_weights_generates_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: DtypeName, changes: dict[str, Any]
) -> None:
    native = probe_native()
    if native.ops is None:
        pytest.skip(native.detail)
    make_checkpoint(tmp_path / "model", **changes)
    monkeypatch.setattr(load, "_LEAST_STORED_BYTES", 0)
    read: list[str] = []
    real = HfWeights.get

    def get(self: HfWeights, name: str, part: Part | None = None) -> Tensor:
        read.append(name)
        return real(self, name, part)

    monkeypatch.setattr(HfWeights, "get", get)
    outputs = []
    device = CpuDevice(1, native.ops)
    for packed_dir in (None, tmp_path / "packed", tmp_path / "packed"):
        read.clear()
        loaded = load_model(tmp_path / "model", device=device, dtype=dtype, progress=False, packed_dir=packed_dir)
        outputs.append(tokens_of(loaded, device))
    assert outputs[0] == outputs[1] == outputs[2]
    assert not [name for name in read if "proj.weight" in name or "lm_head" in name]
    assert len(list((tmp_path / "packed").glob("*.kvpacked"))) == 1
