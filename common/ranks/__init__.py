"""The rank processes of a tensor-parallel node: rank 0 is the node's process, the other ranks are its children.

- `team`, `child`: rank 0's side: starts and watches the children, exchanges messages with them.
- `agent`: a child process: computes step batches and moves KV as rank 0 commands.
- `messages`, `link`: the messages between them, and their encoding.
- `runner`, `kv`: the step runner and the KV mover of rank 0, which include the other ranks.
- `tally`: combines the KV events of all ranks into one event per piece.

Rank 0 alone decides. A child has no scheduler, no clients and no sampler; it knows blocks, never requests.
"""
