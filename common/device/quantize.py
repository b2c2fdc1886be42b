"""Weights in 8 or 4 bits: which values are stored for a matrix, and which matrix they represent.

Knows no kernel layout and multiplies nothing. Schemes:
`int8`: integers from -127 to 127 with one scale per output, symmetric.
`int8_dynamic`: the same weights; the activations are rounded to 8 bits as well, with one scale per 64 values. (One
scale for a whole row doubled the loss in perplexity: 1.4 % against 0.7, SmolLM2-135M, on a text other than that of
`kvferry bench perplexity`.)
`int4`: sixteen steps from the least to the largest value of each group of 32 inputs, as in GGUF's Q4_1, so that a
checkpoint in that format loses nothing.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

WeightScheme = Literal["int8", "int4", "int8_dynamic"]
INT4_GROUP = 32
ROW_GROUP = 64
"""Values of an activation row that share a scale under int8_dynamic."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A [out, in] matrix that represents values * scales + lows, each scale and low shared by a group of inputs."""

    values: Tensor
    """[out, in]: int8, or uint8 from 0 to 15 if there are lows."""
    scales: Tensor
    """[out, groups]: float32, or float16 if there are lows."""
    lows: Tensor | None = None
    """[out, groups] float16."""
    rounds_rows: bool = False
    """Whether the activations are rounded to 8 bits as well."""

    def dequantized(self) -> Tensor:
        """[out, in] float32."""
        grouped = self.values.float().view(*self.scales.shape, -1) * self.scales.float()[..., None]
        return (grouped if self.lows is None else grouped + self.lows.float()[..., None]).flatten(1)


def quantize(weight: Tensor, scheme: WeightScheme) -> Quantized:
    """weight [out, in]. `int4` falls back to `int8` if the inputs are not a multiple of INT4_GROUP."""
    values = weight.float()
    if scheme == "int4" and weight.shape[1] % INT4_GROUP == 0:
        return _int4(values)
    scales = values.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127.0
    rounded = (values / scales).round_().to(torch.int8)
    return Quantized(rounded, scales, rounds_rows=scheme == "int8_dynamic")


def bits_per_weight(scheme: WeightScheme) -> int:
    """Bits per value of a large matrix; int4's scales and lows included, int8's single scale per output neglected."""
    return 4 + 2 * 16 // INT4_GROUP if scheme == "int4" else 8


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in] -> integers from -127 to 127 as float32, [rows, groups, ROW_GROUP] padded with zeros, and the scale
    of each group [rows, groups]."""
    groups = functional.pad(x.float(), (0, -x.shape[1] % ROW_GROUP)).view(len(x), -1, ROW_GROUP)
    most = groups.abs().amax(dim=2)
    inverse = torch.where(most > 0, 127.0 / most, 0.0)
    return (groups * inverse[..., None]).round_(), most / 127.0


def _int4(values: Tensor) -> Quantized:
    groups = values.reshape(len(values), -1, INT4_GROUP)
    lows, highs = groups.amin(dim=-1), groups.amax(dim=-1)
    scales = ((highs - lows) / 15.0).half()
    lows = lows.half()
    steps = (groups - lows.float()[..., None]) / scales.float()[..., None].clamp_min(torch.finfo(torch.float16).tiny)
    return Quantized(steps.round_().clamp_(0, 15).to(torch.uint8).flatten(1), scales, lows)
