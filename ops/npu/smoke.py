"""Run on a real Ascend host: are the kernels right, and how fast are copies between host and device?

    python -m kvferry.ops.npu.smoke [--device npu|cuda|cpu] [--index N]

Unverified: this project is developed without an NPU, so this script has run only with `--device cpu`. What the tests
without an NPU cannot show is shown here: numbers and limits of the kernels, asynchronous copies, the driver.
Prints one line a check; exit code 0 when all passed, 1 when one failed, 2 when there is no such device.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvferry.common.base.errors import DeviceUnavailableError
from kvferry.common.device.base import Device, KvTensorSpec
from kvferry.common.device.ops import AttentionMetadata
from kvferry.common.device.select import known_devices, probe_devices, select_device
from kvferry.common.device.torch_ops import TorchOps

DTYPE = torch.bfloat16
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 128
LENGTHS, NEW = (300, 129, 20), (5, 1, 20)
TOLERANCE = 0.03
"""Relative to the largest value of the reference; bfloat16 keeps 8 bits."""
COPY_BYTES, COPY_ROUNDS = 64 << 20, 10


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    result: str
    passed: bool


def run_checks(device: Device) -> Iterator[Check]:
    """All checks, in order; the calling thread must be bound to the device."""
    torch.manual_seed(0)
    yield from _check_small_ops(device)
    yield from _check_cache_and_attention(device)
    yield from _check_graphs(device)
    yield from _check_draws(device)
    yield from _measure_copies(device)


def _check_small_ops(device: Device) -> Iterator[Check]:
    x, residual, weight, gate_up = (torch.randn(*shape).to(DTYPE) for shape in ((9, 512), (9, 512), (512,), (9, 256)))
    query, key = (torch.randn(9, heads, HEAD_SIZE).to(DTYPE) for heads in (HEADS, KV_HEADS))
    angles = torch.rand(9, HEAD_SIZE // 2).repeat(1, 2) * 6
    matrix = torch.randn(64, 512).to(DTYPE)
    reference = TorchOps()

    def on(tensor: Tensor) -> Tensor:
        return tensor.to(device.torch_device, copy=True)

    ops = device.ops
    yield _compare("rms_norm", ops.rms_norm(on(x), on(weight), 1e-5), reference.rms_norm(x, weight, 1e-5))
    normalised, total = ops.add_rms_norm(on(x), on(residual), on(weight), 1e-5)
    yield _compare("add_rms_norm", normalised, reference.add_rms_norm(x, residual, weight, 1e-5)[0])
    yield _compare("add_rms_norm sum", total, x + residual)
    rotated = ops.rotary(on(query), on(key), on(angles.cos()), on(angles.sin()))
    for name, got, wanted in zip("qk", rotated, reference.rotary(query, key, angles.cos(), angles.sin()), strict=True):
        yield _compare(f"rotary {name}", got, wanted)
    yield _compare("silu_mul", ops.silu_mul(on(gate_up)), reference.silu_mul(gate_up))
    yield _compare("linear", ops.pack_linear(on(matrix))(on(x)), reference.pack_linear(matrix)(x))


def _check_cache_and_attention(device: Device) -> Iterator[Check]:
    blocks, attended = _write_and_attend(device)
    wanted_blocks, wanted = _write_and_attend(select_device("cpu", threads=0))
    yield _compare("kv_write, read_blocks", blocks, wanted_blocks, tolerance=0)
    yield _compare("attention", attended, wanted)


def _write_and_attend(device: Device) -> tuple[Tensor, Tensor]:
    """Write all positions, read two blocks back, attend from the last positions of each sequence."""
    cache, block_size = _written_cache(device)
    blocks = device.read_blocks(cache[0], torch.tensor([3, 1]))
    query = torch.randn(sum(NEW), HEADS, HEAD_SIZE).to(device.torch_device, DTYPE)
    step = _metadata(NEW, block_size, device.torch_device)
    return blocks, device.ops.attention(query, cache, step, HEAD_SIZE**-0.5)


def _written_cache(device: Device) -> tuple[tuple[Tensor, Tensor], int]:
    """Keys and values of all positions, and the block size."""
    torch.manual_seed(1)
    key, value = (torch.randn(sum(LENGTHS), KV_HEADS, HEAD_SIZE).to(device.torch_device, DTYPE) for _ in range(2))
    specs = tuple(KvTensorSpec(name, (KV_HEADS, HEAD_SIZE), DTYPE) for name in ("key", "value"))
    block_size = device.supported_block_size(128)
    keys, values = device.allocate_layer_cache(specs, 8, block_size)
    device.ops.kv_write(key, value, (keys, values), _metadata(LENGTHS, block_size, device.torch_device))
    return (keys, values), block_size


def _check_graphs(device: Device) -> Iterator[Check]:
    """Attention that is recorded for the longest lengths of its tables, and replayed with others."""
    graphs = device.graphs()
    if graphs is None:
        return
    cache, block_size = _written_cache(device)
    query, wanted_query = (torch.randn(len(NEW), HEADS, HEAD_SIZE).to(device.torch_device, DTYPE) for _ in range(2))
    out = torch.zeros(len(NEW), HEADS * HEAD_SIZE, dtype=DTYPE, device=device.torch_device)
    decode = _metadata((1,) * len(NEW), block_size, device.torch_device)
    longest = replace(decode, seq_lens=(decode.block_tables.shape[1] * block_size,) * len(NEW))

    def step() -> None:
        out.copy_(device.ops.attention(query, cache, longest, HEAD_SIZE**-0.5))

    device.synchronize()
    graph = graphs.capture(step)
    query.copy_(wanted_query)
    graph.replay(decode.seq_lens)
    wanted = device.ops.attention(wanted_query, cache, decode, HEAD_SIZE**-0.5)
    yield _compare("recorded attention", out, wanted.cpu())


def _check_draws(device: Device) -> Iterator[Check]:
    """The largest logit: of equal ones the first, and no number where one of them is none."""
    logits = torch.zeros(3, 40000)
    logits[0, [17, 30000]] = logits[1, 39999] = 2.0
    logits[2, 1234] = torch.nan
    largest, tokens = (tensor.cpu() for tensor in logits.to(device.torch_device).max(dim=1))
    right = tokens[:2].tolist() == [17, 39999] and largest.isnan().tolist() == [False, False, True]
    yield Check("largest logits", f"{largest.tolist()} at {tokens.tolist()}", right)


def _metadata(counts: tuple[int, ...], block_size: int, device: torch.device) -> AttentionMetadata:
    """The last `counts` positions of sequences of `LENGTHS`; sequence i has blocks in no particular order."""
    tables = ((5, 3, 7), (1, 6, 0), (2, 0, 0))
    starts = [0]
    slots: list[int] = []
    for table, length, count in zip(tables, LENGTHS, counts, strict=True):
        starts.append(starts[-1] + count)
        positions = range(length - count, length)
        slots.extend(table[position // block_size] * block_size + position % block_size for position in positions)
    return AttentionMetadata(
        query_start_loc=tuple(starts), seq_lens=LENGTHS,
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, device=device), block_size=block_size,
        lengths=torch.tensor(LENGTHS, device=device),
    )  # fmt: skip


def _measure_copies(device: Device) -> Iterator[Check]:
    host = device.pinned_empty(COPY_BYTES)
    host.random_()
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device.torch_device)
    for name, to, source in (("host to device", there, host), ("device to host", host, there)):
        to.copy_(source)
        device.synchronize()
        start = time.perf_counter()
        for _ in range(COPY_ROUNDS):
            to.copy_(source, non_blocking=True)
        device.synchronize()
        rate = COPY_BYTES * COPY_ROUNDS / (time.perf_counter() - start) / 1e9
        same = torch.equal(host, there.cpu())
        yield Check(name, f"{rate:.1f} GB/s ({COPY_BYTES >> 20} MiB each)", same)


def _compare(name: str, got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> Check:
    got, wanted = got.cpu().float(), wanted.float()
    if got.shape != wanted.shape:
        return Check(name, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}", False)
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()
    return Check(name, f"largest difference {error:.2g} of the largest value", error <= tolerance)


def main(arguments: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="Check a device's kernels and copies.")
    parser.add_argument("--device", choices=known_devices(), default="npu")
    parser.add_argument("--index", type=int, default=0)
    chosen = parser.parse_args(arguments)
    for probe in probe_devices():
        sys.stdout.write(f"{probe.name}: {probe.detail}\n")
    try:
        device = select_device(chosen.device, threads=0, index=chosen.index)
    except DeviceUnavailableError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    failed = 0
    for check in run_checks(device):
        failed += not check.passed
        sys.stdout.write(f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.result}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
