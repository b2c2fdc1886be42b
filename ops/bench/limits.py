"""Limits of this machine, measured (memory bandwidth, matmul rate), and the least work that a model's step needs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.common.device.cpu_linear import native_bfloat16
from kvferry.common.device.ops import Ops
from kvferry.common.device.quantize import WeightScheme, bits_per_weight
from kvferry.common.models.config import TransformerConfig

_READ_BYTES = 256 << 20
_MATMUL_SIZE = 1024
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Measured with the calling thread's number of torch threads."""

    read_gb_s: float
    """Bandwidth of reads from main memory, 10^9 bytes per second."""
    matmul_gflop_s: float
    """The faster of torch's and the device ops' square matmul in the model's dtype, 10^9 operations per second."""


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """Least work of a model's step: operations, and bytes read from memory."""

    flop: float
    bytes_read: float

    def tokens_per_s(self, tokens: int, limits: MachineLimits) -> float:
        """Upper bound of the throughput on a machine with these limits."""
        seconds = max(self.flop / (limits.matmul_gflop_s * 1e9), self.bytes_read / (limits.read_gb_s * 1e9))
        return tokens / seconds


def measure_limits(ops: Ops, dtype: torch.dtype) -> MachineLimits:
    """Measure; takes a second or two."""
    memory = torch.ones(_READ_BYTES // 4)
    half = memory.numel() // 2
    read = min(_best(memory.sum), _best(lambda: torch.dot(memory[:half], memory[half:])))
    return MachineLimits(_READ_BYTES / read / 1e9, max(_torch_matmul(dtype), _ops_matmul(ops, dtype)))


def step_needs(
    config: TransformerConfig,
    dtype: torch.dtype,
    new: int,
    context: int,
    sequences: int,
    scheme: WeightScheme | None = None,
) -> StepNeeds | None:
    """Work of a step of `sequences`, each with `new` tokens after `context` cached ones and one sampled token.

    None for latent attention, whose least work depends on the order of its matmuls.
    """
    if config.mla is not None:
        return None
    tokens = new * sequences
    head = config.vocab_size * config.hidden_size
    per_position = 2 * config.num_layers * config.head_dim
    seen = sum(context + position + 1 for position in range(new)) * sequences
    active, touched = _layer_weights(config, tokens)
    flop = 2 * (active * tokens + head * sequences) + 2 * per_position * config.num_heads * seen
    cached = per_position * config.num_kv_heads * (context + new) * sequences
    weight_bytes = dtype.itemsize if scheme is None else bits_per_weight(scheme) / 8
    return StepNeeds(flop, weight_bytes * (touched + head) + dtype.itemsize * cached)


def _layer_weights(config: TransformerConfig, tokens: int) -> tuple[int, int]:
    """Number of weights of all layers that one token is multiplied with, and that a step of `tokens` tokens reads."""
    hidden = config.hidden_size
    projected = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * hidden
    active = touched = 0
    for layer in range(config.num_layers):
        moe = config.moe if config.moe is not None and layer in config.moe.layers else None
        if moe is None:
            mlp = read = 3 * hidden * config.intermediate_size
        else:
            expert, shared = 3 * hidden * moe.intermediate_size, 3 * hidden * moe.shared_intermediate_size
            mlp = expert * moe.experts_per_token + shared
            read = expert * min(moe.num_experts, moe.experts_per_token * tokens) + shared
        active += projected + mlp
        touched += projected + read
    return active, touched


def _torch_matmul(dtype: torch.dtype) -> float:
    """In float32 if the CPU has no bfloat16 instructions, since the multiplications are float32 then."""
    dtype = dtype if dtype != torch.bfloat16 or native_bfloat16() else torch.float32
    left = right = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    return 2 * _MATMUL_SIZE**3 / _best(lambda: left @ right) / 1e9


def _ops_matmul(ops: Ops, dtype: torch.dtype) -> float:
    x = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    linear = ops.pack_linear(x)
    return 2 * _MATMUL_SIZE**3 / _best(lambda: linear(x)) / 1e9


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest round: a limit must not include interruptions."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
