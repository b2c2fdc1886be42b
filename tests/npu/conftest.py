"""These tests run the real torch_npu over stand-ins of CANN, in an environment of their own: `make test-npu`.

Anywhere else they are not collected: the project's own environment has no torch_npu, and on a real NPU host they would
put their reference kernels in the place of the real ones.
"""

import os

import pytest

IN_OWN_ENVIRONMENT = "KVFERRY_CANN_STUB" in os.environ

collect_ignore_glob = [] if IN_OWN_ENVIRONMENT else ["test_*.py"]


def pytest_configure(config):
    # Said once by torch_npu over the stand-ins, whose compile options are empty.
    config.addinivalue_line("filterwarnings", "ignore:Cannot create tensor with internal format")


@pytest.fixture(scope="session")
def torch_npu():
    """The real module, with CPU reference kernels bound to the schemas that `NpuOps` uses."""
    from tests.npu.reference_kernels import bind_kernels

    return bind_kernels()
