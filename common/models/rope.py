"""Rotary embedding: frequencies with default, linear, llama3 or yarn scaling; refuses other types by name.

Formulas as published with the models: linear (position interpolation, arXiv:2306.15595), llama3 (Meta's Llama 3.1
release), yarn (arXiv:2309.00071). Also defines `ModelStep`, the per-step inputs that all layers have in common.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.device.ops import AttentionMetadata
from kvferry.common.models.config import RopeConfig
from kvferry.common.models.settings import Settings


def rope_from_settings(values: Mapping[str, object], theta: float, max_positions: int, where: str) -> RopeConfig:
    """Read HuggingFace's `rope_scaling` or `rope_parameters` object, which may be empty."""
    settings = Settings(values, where)
    theta = settings.number("rope_theta", theta)
    kind = settings.text("rope_type", settings.text("type", "default"))
    settings.require("partial_rotary_factor", (1, 1.0))
    if kind == "default":
        rope = RopeConfig(theta)
    elif kind == "linear":
        rope = RopeConfig(theta, "linear", settings.number("factor"))
    elif kind == "llama3":
        rope = RopeConfig(
            theta,
            "llama3",
            settings.number("factor"),
            settings.number("low_freq_factor"),
            settings.number("high_freq_factor"),
            settings.integer("original_max_position_embeddings"),
        )
    elif kind == "yarn":
        rope = _yarn(settings, theta, max_positions)
    else:
        raise settings.unsupported("rope_type", kind)
    settings.refuse_rest(("type", "rope_type"))
    return rope


def _yarn(settings: Settings, theta: float, max_positions: int) -> RopeConfig:
    settings.require("truncate", (True,))
    factor = settings.number("factor")
    original = settings.integer("original_max_position_embeddings", max_positions)
    mscale, mscale_all_dim = settings.number("mscale", 0.0), settings.number("mscale_all_dim", 0.0)
    if (mscale == 0.0) != (mscale_all_dim == 0.0):
        # Implementations differ in how they read one without the other.
        raise settings.unsupported("mscale without mscale_all_dim, or the reverse", mscale or mscale_all_dim)
    by_default = _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim) if mscale else _magnitude(factor, 1.0)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position_embeddings=original,
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        attention_factor=settings.number("attention_factor", by_default),
        mscale_all_dim=mscale_all_dim,
    )


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int, factors: Tensor | None = None) -> Tensor:
    """[head_dim / 2] float32, radians per position. `factors` [head_dim / 2] (GGUF's rope_freqs) divide them."""
    base = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.type == "linear":
        base = base / rope.factor
    elif rope.type == "llama3":
        base = _llama3(base, rope)
    elif rope.type == "yarn":
        base = _yarn_frequencies(base, rope, head_dim)
    if factors is None:
        return base
    if factors.shape != base.shape:
        raise ModelLoadError(f"rope factors have shape {tuple(factors.shape)}, expected {tuple(base.shape)}")
    return base / factors.float()


def cos_sin(positions: Tensor, frequencies: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """positions [T], frequencies [D / 2] -> cos and sin [T, D] float32, both halves equal."""
    angles = positions.float()[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    return cos, sin


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, blend in between."""
    wavelengths = 2 * math.pi / base
    longest_kept = rope.original_max_position_embeddings / rope.high_freq_factor
    shortest_stretched = rope.original_max_position_embeddings / rope.low_freq_factor
    share_kept = (rope.original_max_position_embeddings / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share_kept) * base / rope.factor + share_kept * base
    stretched = torch.where(wavelengths > shortest_stretched, base / rope.factor, blended)
    return torch.where(wavelengths < longest_kept, base, stretched)


def _yarn_frequencies(base: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """A ramp over the dimensions from those that rotate often (kept) to those that rotate rarely (stretched)."""

    def dimension(turns: float) -> float:
        reach = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(reach) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    width = high - low if high != low else 0.001
    stretched_share = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    return base / rope.factor * stretched_share + base * (1 - stretched_share)


@dataclass(frozen=True, slots=True)
class ModelStep:
    """The inputs that all layers have in common in one step of T tokens."""

    cos: Tensor
    """[T, rotated size] float32, like `sin`."""
    sin: Tensor
    meta: AttentionMetadata
