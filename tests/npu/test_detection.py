"""Every situation that a host can be in, each in a process of its own: the probe says which, and never raises."""

import json
import os
import subprocess
import sys

import pytest

PROBE = """
import dataclasses
from kvferry.common.device.select import probe_devices
result = dataclasses.astuple(probe_devices()[0])
"""
OPEN = """
from kvferry.common.device.select import select_device
from kvferry.common.base.errors import DeviceUnavailableError
try:
    result = str(select_device({name!r}, threads=1, index={index}).torch_device)
except DeviceUnavailableError as error:
    result = str(error)
"""


def in_a_process(code, **environment):
    """What `code` left in `result`; a variable given as None is not set there."""
    full = {name: value for name, value in (os.environ | environment).items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json\nprint(json.dumps(result))"],
        capture_output=True, text=True, check=False, env=full, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_not_installed():
    result = in_a_process('import sys; sys.modules["torch_npu"] = None\n' + PROBE)
    assert result == ["npu", False, "torch-npu is not installed: pip install -e '.[npu]' in kvferry's directory", 0]


def test_no_cann():
    name, available, detail, count = in_a_process(PROBE, LD_LIBRARY_PATH=None)
    assert (name, available, count) == ("npu", False, 0)
    assert detail.startswith("CANN cannot be loaded (libascendcl.so: ")
    assert "set_env.sh" in detail


def test_a_cann_that_is_only_half_set_up(tmp_path):
    _, available, detail, count = in_a_process(PROBE, ASCEND_HOME_PATH=str(tmp_path), ASCEND_OPP_PATH=None)
    assert (available, count) == (False, 0)
    assert detail.startswith("torch_npu cannot be used: ASCEND_OPP_PATH environment variable is not set")


@pytest.mark.parametrize(("chosen", "hint"), [(None, "is /dev/davinci* there?"), ("9", "ASCEND_RT_VISIBLE_DEVICES=9")])
def test_no_npu_visible(chosen, hint):
    result = in_a_process(PROBE, HOST_ACL_DEVICES="0", ASCEND_RT_VISIBLE_DEVICES=chosen)
    assert result == ["npu", False, f"no NPU visible ({hint})", 0]


def test_four_npus():
    assert in_a_process(PROBE, HOST_ACL_DEVICES="4") == ["npu", True, "Ascend910B1", 4]


@pytest.mark.parametrize("hide", [{"LD_LIBRARY_PATH": None}, {"HOST_ACL_DEVICES": "0"}])
def test_without_cann_or_npu_the_rest_still_works(hide):
    """torch_npu is installed, so a plain `import torch` fails without CANN: the package turns autoload off itself."""
    hide |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": None}
    assert in_a_process(OPEN.format(name="auto", index=0), **hide) == "cpu"


def test_auto_takes_the_npu_where_there_is_one():
    assert in_a_process(OPEN.format(name="auto", index=1)) == "npu:1"


def test_auto_passes_over_an_npu_that_cannot_be_opened():
    assert in_a_process(OPEN.format(name="auto", index=0), HOST_ACL_REFUSE_SET="1") == "cpu"


def test_a_named_npu_that_cannot_be_opened_is_refused():
    result = in_a_process(OPEN.format(name="npu", index=0), HOST_ACL_REFUSE_SET="1")
    assert result.startswith("device npu:0 cannot be opened: ")


def test_an_npu_beyond_the_last_is_refused():
    result = in_a_process(OPEN.format(name="npu", index=7))
    assert result == "device npu:7 is not available: only 2 visible (Ascend910B1)"


def test_a_missing_npu_is_refused_with_what_is_missing():
    result = in_a_process(OPEN.format(name="npu", index=0), LD_LIBRARY_PATH=None)
    assert result.startswith("device npu:0 is not available: CANN cannot be loaded")
