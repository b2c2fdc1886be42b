"""Quantised weights: the matrix they represent, and that native and torch kernels multiply by exactly that matrix."""

import pytest
import torch
from torch import Tensor

from kvferry.common.device.ops import Linear
from kvferry.common.device.quantize import INT4_GROUP, WeightScheme, bits_per_weight, quantize
from tests.support.cpu_ops import ops_named

SCHEMES: list[WeightScheme] = ["int8", "int4", "int8_dynamic"]
SHAPES = [(33, 20), (16, 7), (1, 1), (96, 576), (70, 1001), (64, 96), (40, 130)]
"""Whole panels and groups, and remainders of both."""
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(name: str, weight: Tensor, bias: Tensor | None, scheme: WeightScheme) -> Linear:
    return ops_named(name).pack_linear(weight, bias, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_error_of_a_weight_is_at_most_half_a_step(scheme: WeightScheme) -> None:
    weight = randn(48, 8 * INT4_GROUP)
    kept = quantize(weight, scheme)
    step = kept.scales.float().repeat_interleave(weight.shape[1] // kept.scales.shape[1], dim=1)
    rounding = 0.51 if kept.lows is None else 0.6  # scales and lows of int4 are rounded to float16 as well
    assert ((kept.dequantized() - weight).abs() <= rounding * step).all()


def test_sixteen_equal_steps_are_represented_exactly() -> None:
    """As in a Q4_1 checkpoint."""
    steps = torch.randint(0, 16, (8, 4, INT4_GROUP), generator=torch.Generator().manual_seed(1))
    steps[..., 0], steps[..., 1] = 0, 15
    scale, low = torch.tensor(0.0625), torch.tensor(-0.4375)
    weight = (steps * scale + low).flatten(1)
    assert torch.equal(quantize(weight, "int4").dequantized(), weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_zeros_and_of_a_constant(scheme: WeightScheme) -> None:
    weight = torch.zeros(3, INT4_GROUP)
    weight[1] = 2.0
    assert torch.allclose(quantize(weight, scheme).dequantized(), weight, atol=1e-3)


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_product_uses_exactly_the_dequantised_weights(
    name: str, dtype: torch.dtype, outputs: int, inputs: int, scheme: WeightScheme
) -> None:
    weight, bias, x = (
        randn(outputs, inputs, dtype=dtype),
        randn(outputs, seed=1, dtype=dtype),
        randn(50, inputs, seed=2),
    )
    wanted = x.to(dtype).double() @ quantize(weight, scheme).dequantized().double().T + bias.double()
    for rows in (1, 3, 16, 17, 50):
        got = packed(name, weight, bias, scheme)(x[:rows].to(dtype))
        assert got.dtype == dtype
        assert (got.double() - wanted[:rows]).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_native_and_torch_round_rows_alike(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Both are also near the exact product."""
    weight, x = randn(outputs, inputs, dtype=dtype), randn(50, inputs, seed=2, dtype=dtype)
    x[3] = 0.0
    native, plain = (packed(name, weight, None, "int8_dynamic")(x).double() for name in ("native", "torch"))
    exact = x.double() @ weight.double().T
    assert (native - plain).abs().max() <= TOLERANCE[dtype] * exact.abs().max()
    assert (native - exact).abs().max() <= 0.03 * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("inputs", [160, 1001])
def test_a_row_does_not_depend_on_the_other_rows(dtype: torch.dtype, scheme: WeightScheme, inputs: int) -> None:
    """Bitwise: with or without widened panels, in any block, with any number of threads."""
    linear = packed("native", randn(100, inputs, dtype=dtype), None, scheme)
    x = randn(530, inputs, seed=2, dtype=dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = linear(x)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, torch.cat([linear(row[None]) for row in x]))
    for count in (2, 5, 6, 7, 9, 12, 16, 17, 31, 32, 33, 40, 257):
        assert torch.equal(linear(x[:count]), together[:count])


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_and_infinity_affect_exactly_their_own_rows(name: str, dtype: torch.dtype, scheme: WeightScheme) -> None:
    linear = packed(name, randn(20, 96, dtype=dtype), None, scheme)
    x = randn(40, 96, seed=2, dtype=dtype)
    x[2, 5], x[7, 95] = torch.nan, torch.inf
    assert [row for row, known in enumerate(linear(x).isfinite().any(1)) if not known] == [2, 7]
    assert not linear(x[2:3]).isfinite().any()


def test_int4_falls_back_to_8_bits_for_partial_groups() -> None:
    assert quantize(randn(4, INT4_GROUP + 1), "int4").lows is None
    assert [bits_per_weight(scheme) for scheme in SCHEMES] == [8, 5, 8]
