"""Reductions (arXiv 2110.10548): the published language and its enumeration, and the shortest path over types.

- `instructions`   the paper's language; `state_matrix` its checker, `interpreter` its meaning on numbers
- `state_graph`    every state that programs reach, and the programs; `hierarchies` the paper's four
- `type_graph`     the types that reductions go through, as a graph; `shortest_path` the cheapest way
- `payload`        a payload as a type, programs as ops
- `enumeration`    the verb `reductions`: every program up to a size; `reduce` the verb: the best
"""
