"""`python -P .../kvferry/run_module.py MODULE ARGS...`: runs a module of the package that holds this file.

kvferry starts its own processes this way, not with `python -m`. The package is loaded from this file's folder before
`sys.path` is searched, so nothing in the current folder, in PYTHONPATH or in another distribution can replace a part of
it. May import the standard library only.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent


def _load_package() -> None:
    name = _FOLDER.name
    spec = importlib.util.spec_from_file_location(
        name, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _load_package()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
