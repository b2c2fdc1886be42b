"""The ranks of a tensor-parallel node, as processes: rank 0 is the node, each other one is a child of it.

- `team`, `child`: rank 0's side: starts the children, watches them, and passes on what they are told.
- `agent`: a child: runs the steps and moves the KV that rank 0 tells it to.
- `messages`: what the two say to one another.
- `runner`, `kv`: what the node's engine and its mover of KV are on rank 0.
- `tally`: one word of each piece out of those of all ranks.

Rank 0 alone decides. A child has no scheduler, no clients and no sampler; it knows blocks, never requests.
"""
