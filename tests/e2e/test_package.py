"""The package as it is installed: what the wheel holds, and that no other module can replace a part of it.

A wheel is built from a copy of the sources and installed into an environment of its own, which finds the dependencies
in this one; no package index is asked. That one and the editable installation then run from a folder of traps: modules
with the names of our folders, of dependencies and of the standard library, which record that they were imported.
"""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.conftest import Reference
from tests.support.infer_cases import VOCAB_SIZE
from tests.support.serve import ServeOptions, serving
from tests.support.tiny_llama import random_prompt

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
FOLDERS = ("common", "decode_node", "ops", "prefill_node", "router", "src", "tests")
DEADLINE_S = 120.0
TRAP = """
with open(__file__ + ".imported", "w"):
    raise ImportError(__file__)
"""
IN_FOLDER = (
    "common.py", "ops/__init__.py", "router.py", "kvferry_ops.py", "queue.py", "tomllib.py", "argparse.py", "falcon.py",
    "gunicorn/__init__.py", "zmq/__init__.py",
)  # fmt: skip
IN_PYTHONPATH = ("common/__init__.py", "ops/__init__.py", "router/__init__.py")
PROMPT = random_prompt(41, 12, VOCAB_SIZE)


@dataclass(frozen=True)
class Installed:
    """An installation: its interpreter and its command."""

    python: Path
    command: Path
    pythonpath: tuple[str, ...] = ()
    """What PYTHONPATH needs to have."""

    def folder(self, traps: "Traps") -> Path:
        """Where its package is."""
        script = "import kvferry; print(kvferry.__path__[0])"
        said = run(str(self.python), "-P", "-c", script, cwd=traps.cwd, env={**os.environ, **traps.env})
        return Path(said.rstrip())


@dataclass(frozen=True)
class Traps:
    """A folder to start from and one for PYTHONPATH, both with modules that must not be imported."""

    cwd: Path
    pythonpath: Path
    env: dict[str, str] = field(default_factory=dict)

    def imported(self) -> list[str]:
        """The traps that were."""
        found = (path for folder in (self.cwd, self.pythonpath) for path in folder.rglob("*.imported"))
        return sorted(str(path) for path in found)


def run(*words: str, **options: object) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    output: str = done.stdout
    return output


def pip(*words: str) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree: setuptools writes into the folder that it builds from, and reuses files of older builds."""
    source = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the copy."""
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(source))
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel_install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment of its own, which finds dependencies behind its own packages."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = place.glob("lib/python*/site-packages")
    dependencies = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    return Installed(python, place / "bin" / "kvferry")


@pytest.fixture(scope="module")
def editable_install() -> Installed:
    """What these tests run in."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return Installed(Path(sys.executable), Path(sys.executable).with_name("kvferry"), tuple(filter(None, given)))


@pytest.fixture(params=["wheel_install", "editable_install"])
def installed(request: pytest.FixtureRequest) -> Installed:
    """Each way of installing."""
    found: Installed = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def traps(installed: Installed, tmp_path: Path) -> Iterator[Traps]:
    """Traps for this installation. None of them was imported in the end."""
    cwd, pythonpath = tmp_path / "cwd", tmp_path / "pythonpath"
    for folder, names in ((cwd, IN_FOLDER), (pythonpath, IN_PYTHONPATH)):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(TRAP)
    traps = Traps(cwd, pythonpath, {"PYTHONPATH": os.pathsep.join((str(pythonpath), *installed.pythonpath))})
    yield traps
    assert traps.imported() == []


def test_the_wheel_holds_one_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    (info,) = {name.partition("/")[0] for name in names} - {"kvferry"}
    assert re.fullmatch(r"kvferry-[\d.]+\.dist-info", info)
    assert not [name for name in names if "tests" in Path(name).parts]


def test_the_wheel_holds_what_is_read_at_run_time(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    native = {f"kvferry/{path.relative_to(ROOT)}" for path in ROOT.glob("common/device/native/src/*.[ch]*")}
    assert any(name.endswith(".cpp") for name in native)
    assert any(name.endswith(".h") for name in native)
    data = {"kvferry/ops/bench/perplexity.txt", "kvferry/ops/check_words.toml", "kvferry/py.typed"}
    assert (native | data) - held == set()


def test_the_source_distribution_holds_one_package(source: Path, tmp_path: Path) -> None:
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=source)
    (file,) = tmp_path.iterdir()
    with tarfile.open(file) as archive:
        paths = [Path(*Path(name).parts[1:]) for name in archive.getnames()]
    assert {path.name for path in paths if path.parent == Path("src")} == {"kvferry", "kvferry.egg-info", "README.md"}
    assert {path.parts[0] for path in paths if path.suffix in (".py", ".cpp", ".h")} == {"src"}


def test_the_description_has_no_link_into_the_repository(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = email.message_from_bytes(archive.read(name)).get_payload()
    assert isinstance(text, str)
    assert text.startswith("# kvferry")
    targets = re.findall(r"\]\(([^)]+)\)|^\[[^\]]+\]: *(\S+)|(?:href|src)=\"([^\"]+)\"", text, flags=re.MULTILINE)
    assert [target for found in targets for target in found if target and not target.startswith("https://")] == []


def test_commands_run_in_a_folder_of_traps(installed: Installed, traps: Traps) -> None:
    env = {**os.environ, **traps.env}
    for command in ((installed.command,), (installed.python, "-m", "kvferry")):
        said = run(*map(str, command), "--version", cwd=traps.cwd, env=env)
        assert re.fullmatch(r"kvferry [\d.]+\n", said)
    environment = installed.python.parents[1]
    is_copy = installed.folder(traps).is_relative_to(environment)
    assert is_copy != (environment == Path(sys.prefix))  # the wheel's own copy, and the sources


def test_a_cluster_serves_in_a_folder_of_traps(installed: Installed, traps: Traps, reference: Reference) -> None:
    options = ServeOptions(
        reference.path, interpreter=(), program=(str(installed.command),), cwd=traps.cwd, environment=traps.env
    )
    with serving(options) as served:
        ids = ",".join(map(str, PROMPT))
        words = ("infer", "--url", served.url, "--model", served.model, "--tokens", ids, "--max-new-tokens", "4")
        said = run(str(installed.command), *words, cwd=traps.cwd, env={**os.environ, **traps.env})
        assert f"ids    {reference.tokens(PROMPT, 4)}" in said.splitlines()
        children = served.children()
        assert {*children} == {"proxy", "router", "prefill-0", "decode-0"}
        runner = str(installed.folder(traps) / "run_module.py")
        assert [name for name, child in children.items() if runner not in child.cmdline()] == []


def test_traps_record_that_they_were_imported(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "router.py").write_text(TRAP)
    words = (str(installed.python), "-c", "import router")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1
    assert Traps(tmp_path, tmp_path / "none").imported() == [str(tmp_path / "router.py.imported")]
