"""Many tensors as one plan, and moves between meshes.

Reading order:

- `tiles`      the smaller tiles that a send may carry to another mesh, ranked, and the gathers behind it
- `crossings`  the candidates of one tensor between two meshes: send, relabel, gather behind
- `batch`      the plan of many tensors: packs of equal moves, side by side, in waves or in the order of least peak
"""
