"""Reductions (arXiv 2110.10548): the published language and its enumeration, and the shortest path over types.

Reading order:

- `instructions`   the paper's language: groupings of a hierarchy's members, and collectives on them
- `state_matrix`   the checker of programs in it, by Hoare triples on what each member holds
- `state_graph`    every state that programs reach, and the programs as paths
- `type_graph`     the types that a reduction goes through, as a graph with prices, and the cheapest way
- `typed_path`     such a way as typed ops, on a tensor of any shape
- `payload`        what is reduced as a tensor type
- `enumeration`    the verb `reductions`: every program up to a size, with its price
- `sizes`          a program on payloads of other sizes
- `reduce`         the verb `reduce`: the best program of any size
"""
