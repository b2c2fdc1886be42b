"""The engine of every role: what turns a step plan into tokens. The pieces:

- `kv_cache`: a model's paged cache on one device, and its bytes in the wire's order.
- `batch`: a step plan as flat tensors (ids, positions, slots, block tables).
- `runner`: one step: batch, forward pass, logits of the sampled positions, draw.
- `sampler`, `sampling_math`: penalty, temperature, top-k, top-p, and the draw, for the whole batch at once.
- `philox`: the counter-based generator behind the draw.

Scheduling is elsewhere (`common.scheduling`): pure, and light.
"""
