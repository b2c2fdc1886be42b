"""The engine of every role: computes a step batch and returns its sampled tokens. May import torch.

- `engine_thread`: runs step batches in FIFO order on a thread of its own.
- `runner`: one step: input batch, swaps, forward pass, logits of the sampled positions, sampling.
- `batch`: a step batch as flat tensors (ids, positions, slots, block tables).
- `step_buffers`: pinned host memory through which inputs and results are copied.
- `decode_graphs`: recorded decode steps for a table of batch sizes.
- `kv_cache`, `host_cache`: the paged cache on one device, and the host blocks for swapped sequences.
- `sampler`, `sampling_math`: repetition penalty, temperature, top-k, top-p and sampling for the whole batch.
- `philox`: the counter-based random generator that sampling uses.

Scheduling is in `common.scheduling`: pure, and free of torch.
"""
