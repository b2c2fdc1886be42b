"""Tensor parallel: one model cut over N ranks, each of which computes its part of every layer. What it is cut along:

- `shard`: which part is whose, and which sizes must divide.
- `collectives`: the two operations between ranks, a sum and a gathering.
- `vocabulary`: embedding and head, cut along the vocabulary.
- `group`: how the ranks of one node find one another.

The processes of the ranks are elsewhere (`kvferry.common.ranks`).
"""
