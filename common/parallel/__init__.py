"""Tensor parallelism: one model sharded over N ranks, each of which computes its part of every layer.

- `shard`: which part a rank has, and which sizes must divide.
- `collectives`: the two operations between ranks, all-reduce and all-gather.
- `vocabulary`: embedding and head, sharded along the vocabulary.
- `group`: rendezvous of the ranks of one node.

The rank processes are in `common.ranks`.
"""
