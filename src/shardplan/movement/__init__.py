"""Redistribution synthesis: the cheapest certified program from one layout to another.

- `units`       two types on one mesh as a problem over units (runs of prime sub-axes)
- `space`       the state graph: every type over the units, and the cost of one op between any two
- `search`      exact shortest paths over it
- `emit`        a path as ops
- `candidates`  the families that compete, for one tensor on one mesh
- `crossmesh`   moves between meshes: send, relabel, gather behind
- `fit`         choosing among candidates, chunks under a memory limit
- `batch`       many tensors as one plan
- `redistribute` the verb

A certificate is issued by `hardware` and knows nothing of this room.
"""
