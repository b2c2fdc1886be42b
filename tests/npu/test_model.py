"""A small Llama on the NPU's ops, reference kernels behind them: the whole path from token ids to logits."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from kvferry.common.device.base import Device
from kvferry.common.device.npu_ops import NpuFeatures, NpuOps, causal_mask
from kvferry.common.device.ops import AttentionMetadata
from kvferry.common.device.paged import allocate_paged
from kvferry.common.device.torch_ops import TorchOps
from kvferry.common.models.config import RopeConfig, TransformerConfig
from kvferry.common.models.decoder import DecoderModel
from kvferry.common.models.weights import TrackedWeights
from tests.npu.reference_kernels import calls

CPU = torch.device("cpu")
BLOCK = 128
CONFIG = TransformerConfig(
    architecture="LlamaForCausalLM", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=128,
    intermediate_size=96, vocab_size=50, rms_norm_eps=1e-5, rope=RopeConfig(10000.0), max_position_embeddings=512,
    tie_word_embeddings=True,
)  # fmt: skip


class RandomWeights:
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        sizes = {"self_attn.q_proj": (512, 64), "self_attn.k_proj": (256, 64), "self_attn.v_proj": (256, 64),
                 "self_attn.o_proj": (64, 512), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64),
                 "mlp.down_proj": (64, 96), "input_layernorm": (64,), "post_attention_layernorm": (64,)}  # fmt: skip
        shapes = {f"model.layers.{layer}.{name}.weight": size for layer in range(2) for name, size in sizes.items()}
        shapes |= {"model.embed_tokens.weight": (50, 64), "model.norm.weight": (64,)}
        self._tensors = {name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}

    def names(self):
        return frozenset(self._tensors)

    def shape(self, name):
        return tuple(self._tensors[name].shape)

    def get(self, name, part=None):
        return self._tensors[name] if part is None else part.cut(self._tensors[name])


def logits_of_two_steps(ops):
    """A prompt of 140 tokens in two chunks, the second next to another sequence's decode token."""
    # Loading and running a model uses a device's ops and its torch device, nothing else of it.
    device = cast(Device, SimpleNamespace(ops=ops, torch_device=CPU))
    model = DecoderModel.load(CONFIG, TrackedWeights(RandomWeights(), lambda: None), device, torch.bfloat16)
    caches = [allocate_paged(model.kv_specs, 6, BLOCK, CPU) for _ in range(2)]
    tables = torch.tensor([[4, 2], [1, 0]], dtype=torch.int32)
    ids = torch.arange(200) * 7 % 50
    steps = [(((0, 130), (0, 9)), (130, 9)), (((130, 140), (9, 10)), (140, 10))]
    out = []
    for ranges, lengths in steps:
        positions = torch.cat([torch.arange(start, end) for start, end in ranges])
        owners = torch.cat([torch.full((end - start,), row) for row, (start, end) in enumerate(ranges)])
        slots = tables[owners, positions // BLOCK].long() * BLOCK + positions % BLOCK
        count = ranges[0][1] - ranges[0][0]
        meta = AttentionMetadata((0, count, len(positions)), lengths, tables, slots, BLOCK, torch.tensor(lengths))
        hidden = model.forward(ids[positions + owners], positions, caches, meta)
        out.append(model.logits(hidden))
    return torch.cat(out)


@pytest.mark.parametrize("cache_write", ["reshape_and_cache", "scatter_pa"])
def test_the_model_path_on_npu_ops_equals_plain_torch(torch_npu, cache_write):
    calls.clear()
    features = NpuFeatures(True, True, True, cache_write=cache_write, attention=True)
    got = logits_of_two_steps(NpuOps(torch_npu, features, causal_mask(CPU)))
    wanted = logits_of_two_steps(TorchOps())
    assert calls["npu_fused_infer_attention_score"] == 4
    assert got.isfinite().all()
    assert (got - wanted).abs().max() < 0.03 * wanted.abs().max()
