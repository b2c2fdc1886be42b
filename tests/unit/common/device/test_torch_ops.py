"""The plain ops on the paged layout, against independent implementations of attention and norms."""

import math

import pytest
import torch

from kvferry.common.device.torch_ops import TorchOps
from tests.npu.reference_kernels import dense_attention
from tests.support.ragged_batch import make_ragged_batch

OPS = TorchOps()
SCALE = 0.2


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1)


def attended(batch):
    keys, values = batch.all_keys()
    OPS.kv_write(keys, values, batch.cache, batch.write_meta)
    return OPS.attention(batch.query, batch.cache, batch.meta, SCALE)


def expected(batch, new):
    parts = zip(batch.query.split(list(new)), batch.keys, batch.values, strict=True)
    return torch.cat([dense_attention(query, keys, values, SCALE) for query, keys, values in parts]).flatten(1)


@pytest.mark.parametrize(
    ("lengths", "new"),
    [
        ((1,), (1,)),
        ((5,), (5,)),
        ((37, 20, 16), (5, 2, 16)),
        ((37, 20, 3), (1, 1, 1)),
        ((37, 33, 20, 4), (1, 30, 1, 4)),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_paged_attention_equals_dense(lengths, new, heads, kv_heads):
    batch = make_ragged_batch(lengths, new, heads=heads, kv_heads=kv_heads, size=16, block_size=16)
    torch.testing.assert_close(attended(batch), expected(batch, new), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("new", [(1, 1), (1, 9), (7, 9)])
def test_old_data_beyond_a_sequence_does_not_spread(new):
    """A failed request may leave NaN in blocks that another request then uses."""
    batch = make_ragged_batch((20, 9), new, size=16, block_size=16, fill=math.nan)
    torch.testing.assert_close(attended(batch), expected(batch, new), rtol=1e-4, atol=1e-5)


def test_kv_write_touches_only_its_slots():
    batch = make_ragged_batch((37, 20), (3, 1), size=8, block_size=16, fill=7.0)
    key, value = (torch.full((4, 2, 8), number) for number in (1.0, 2.0))
    OPS.kv_write(key, value, batch.cache, batch.meta)
    for tensor, number in zip(batch.cache, (1.0, 2.0), strict=True):
        flat = tensor.view(-1, 16)
        written = (flat == number).all(-1).nonzero().flatten()
        assert torch.equal(written, batch.meta.slot_mapping.sort().values)
        assert ((flat == number) | (flat == 7.0)).all()


def test_add_rms_norm_is_the_sum_and_its_norm():
    x, residual = torch.randn(3, 32), torch.randn(3, 32)
    weight = torch.rand(32)
    normalised, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normalised, torch.nn.functional.rms_norm(x + residual, (32,), weight, 1e-5))


def test_rotary_rotates_each_pair_by_its_angle():
    angles = torch.rand(5, 4) * 6
    both = torch.cat((angles, angles), -1)
    query, key = torch.randn(5, 3, 8), torch.randn(5, 1, 8)
    rotated = OPS.rotary(query, key, both.cos(), both.sin())
    for before, after in zip((query, key), rotated, strict=True):
        turned = torch.complex(before[..., :4], before[..., 4:]) * torch.polar(torch.ones(5, 1, 4), angles[:, None])
        torch.testing.assert_close(after, torch.cat((turned.real, turned.imag), -1))


def test_silu_mul_and_linear():
    x = torch.randn(4, 6)
    torch.testing.assert_close(OPS.silu_mul(x), x[:, :3] * torch.sigmoid(x[:, :3]) * x[:, 3:])
    weight, bias = torch.randn(2, 6), torch.randn(2)
    torch.testing.assert_close(OPS.pack_linear(weight, bias)(x), x @ weight.T + bias)
