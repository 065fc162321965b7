"""Many tensors as one plan, and moves between meshes.

Reading order:

- `crossings`  the candidates of one tensor between two meshes: send, relabel, gather behind
- `batch`      the plan of many tensors: packs of equal moves, or one by one in the order of least peak
"""
