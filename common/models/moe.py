"""A mixture of experts: a router scores the experts for each token; the best are computed and summed with weights.

Some families add a shared MLP that every token passes.
"""

from typing import Self

import torch
from torch import Tensor

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.device.ops import Experts, Linear
from kvferry.common.models.config import MoeConfig
from kvferry.common.models.loader import WeightLoader
from kvferry.common.models.mlp import Mlp, load_partial_mlp
from kvferry.common.parallel.collectives import Collectives

_NEVER_ZERO = 1e-20
"""Added to a sum of sigmoids before dividing by it."""


class Router:
    """Chooses `experts_per_token` experts for each token, and their weights."""

    def __init__(self, moe: MoeConfig, scores: Linear, bias: Tensor | None) -> None:
        """`scores`: [T, hidden] -> [T, experts]; `bias` [experts] float32 affects only the choice."""
        self._moe = moe
        self._scores = scores
        self._bias = bias

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> chosen experts [T, k] int64, weights [T, k] float32."""
        moe = self._moe
        logits = self._scores(hidden.float() if moe.float32_router else hidden).float()
        scores = logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(-1)
        eligible = scores if self._bias is None else scores + self._bias
        if moe.groups_kept < moe.num_groups:
            eligible = self._best_groups_only(eligible)
        chosen = eligible.topk(moe.experts_per_token, dim=-1).indices
        weights = scores.gather(1, chosen)
        if moe.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + (_NEVER_ZERO if moe.scoring == "sigmoid" else 0.0))
        return chosen, weights * moe.scaling

    def _best_groups_only(self, scores: Tensor) -> Tensor:
        """scores [T, experts] with -inf for experts outside the best groups."""
        moe = self._moe
        grouped = scores.unflatten(1, (moe.num_groups, -1))  # type: ignore[no-untyped-call]
        group_scores = grouped.topk(moe.group_score_experts, dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, group_scores.topk(moe.groups_kept, dim=-1).indices, True)
        masked: Tensor = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        return masked


class MoeMlp:
    """Implements Mlp. Every rank chooses the same experts and computes its part of each."""

    def __init__(self, router: Router, experts: Experts, shared: Mlp | None, collectives: Collectives) -> None:
        self._router = router
        self._experts = experts
        self._shared = shared
        self._collectives = collectives

    @classmethod
    def load(cls, prefix: str, hidden_size: int, moe: MoeConfig, has_bias: bool, loader: WeightLoader) -> Self:
        """Load router, experts and the shared MLP (the only part that may have biases) below `prefix`."""
        router_dtype = torch.float32 if moe.float32_router else loader.dtype
        gate = loader.tensor(prefix + "gate.weight", moe.num_experts, hidden_size, dtype=router_dtype)
        bias = None
        if moe.has_score_bias:
            bias = loader.tensor(prefix + "gate.e_score_correction_bias", moe.num_experts, dtype=torch.float32)
        gate_ups, downs = [], []
        for expert in range(moe.num_experts):
            own, size = f"{prefix}experts.{expert}.", moe.intermediate_size
            merged = {own + "gate_proj": size, own + "up_proj": size}
            gate_ups.append(loader.stacked(merged, hidden_size, False, split=True)[0])
            downs.append(loader.tensor(own + "down_proj.weight", hidden_size, size, split=1))
        shared = None
        if moe.shared_intermediate_size:
            size = moe.shared_intermediate_size
            shared = load_partial_mlp(prefix + "shared_experts.", hidden_size, size, has_bias, loader)
        router = Router(moe, loader.ops.pack_linear(gate), bias)
        return cls(router, loader.ops.pack_experts(gate_ups, downs, loader.scheme), shared, loader.collectives)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        out = self._experts(hidden, *self._router(hidden))
        return self._collectives.all_reduce(out if self._shared is None else out + self._shared(hidden))


def check_experts(moe: MoeConfig) -> None:
    """Raise ModelLoadError if the numbers of experts and groups are inconsistent."""
    per_group = moe.num_experts // moe.num_groups
    fits = (
        moe.num_experts % moe.num_groups == 0
        and moe.groups_kept <= moe.num_groups
        and moe.group_score_experts <= per_group
        and moe.experts_per_token <= moe.groups_kept * per_group
    )
    if not fits:
        raise ModelLoadError(
            f"config.json: cannot choose {moe.experts_per_token} of {moe.num_experts} experts per token from "
            f"{moe.groups_kept} of {moe.num_groups} groups"
        )
