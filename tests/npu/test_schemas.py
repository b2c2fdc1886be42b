"""Every call that `NpuOps` makes, against the op schemas and meta kernels of the real torch_npu. No numbers here.

Fake tensors on `npu:0` go through the shape and device checks of the real ops; what has no meta kernel is compared with
its schema by parameter name.
"""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvferry.common.device.npu_ops import MASK_SIZE, NpuFeatures, NpuOps, TorchNpuOps
from kvferry.common.device.ops import AttentionMetadata

FEATURES = NpuFeatures(True, True, True, cache_write="scatter_pa", attention=True)
T, H, K, D, BLOCK = 7, 8, 2, 128, 128
CALLED = [name for name, member in vars(TorchNpuOps).items() if "npu_" in name and inspect.isfunction(member)]


@pytest.fixture
def fake():
    with FakeTensorMode() as mode:
        yield mode


@pytest.fixture
def ops(torch_npu, fake):
    return NpuOps(torch_npu, FEATURES, on_npu(MASK_SIZE, MASK_SIZE, dtype=torch.int8))


def on_npu(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="npu:0")


def cache():
    return on_npu(12, BLOCK, K, D), on_npu(12, BLOCK, K, D)


def meta():
    tables, slots = on_npu(2, 4, dtype=torch.int32), on_npu(T, dtype=torch.int64)
    return AttentionMetadata((0, 5, T), (300, 2), tables, slots, BLOCK, on_npu(2, dtype=torch.int64))


@pytest.mark.parametrize("name", CALLED)
def test_the_parameters_written_down_are_those_of_the_op(torch_npu, name):
    namespace = torch.ops.atb if name.startswith("_npu") else torch.ops.npu
    arguments = getattr(namespace, name).default._schema.arguments
    known = {argument.name: argument for argument in arguments}
    written = inspect.signature(getattr(TorchNpuOps, name)).parameters
    for parameter in list(written.values())[1:]:
        assert parameter.name in known
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword_only or not known[parameter.name].kwarg_only
    missing = [argument.name for argument in arguments if not argument.has_default_value()]
    assert set(missing) <= set(written)
    assert callable(getattr(torch_npu, name))


def test_seven_ops_are_written_down():
    assert len(CALLED) == 7


def test_norms(ops):
    x, residual, weight = on_npu(T, 64), on_npu(T, 64), on_npu(64)
    normalised, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    for out in (ops.rms_norm(x, weight, 1e-5), normalised, total):
        assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, x.device)


def test_rotary(ops):
    query, key = ops.rotary(
        on_npu(T, H, D), on_npu(T, K, D), *(on_npu(T, D, dtype=torch.float32) for _ in range(2))
    )  # fmt: skip
    assert query.shape == (T, H, D)
    assert key.shape == (T, K, D)
    assert query.dtype == key.dtype == torch.bfloat16


def test_silu_mul(ops):
    assert ops.silu_mul(on_npu(T, 64)).shape == (T, 32)


def test_kv_write(ops):
    ops.kv_write(on_npu(T, K, D), on_npu(T, K, D), cache(), meta())


def test_attention(ops):
    out = ops.attention(on_npu(T, H, D), cache(), meta(), 0.1)
    assert (out.shape, out.dtype, out.device.type) == ((T, H * D), torch.bfloat16, "npu")


def test_tensors_of_two_devices_are_refused(ops):
    with pytest.raises(RuntimeError, match=r"npu:0.*cpu|cpu.*npu:0"):
        ops.rms_norm(on_npu(T, 64), torch.empty(64, dtype=torch.bfloat16), 1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda npu, x: npu.npu_rms_norm(x, x[0], eps=1e-5),
        lambda npu, x: npu.npu_add_rms_norm(x, x[0]),
        lambda npu, x: npu._npu_reshape_and_cache(key=x, value=x, key_cache=x, value_cache=x, slot_mapping=x),
        lambda npu, x: npu.npu_fused_infer_attention_score(query=x, key=x, value=x, num_head=8),
        lambda npu, x: npu.npu_swiglu(x, axis=-1),
    ],
)
def test_a_call_that_does_not_fit_the_schema_is_refused(torch_npu, fake, wrong):
    with pytest.raises(RuntimeError, match=r"(?s)(nknown keyword|missing value|Expected a value|expected at most)"):
        wrong(torch_npu, on_npu(T, 64))
