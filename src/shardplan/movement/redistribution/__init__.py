"""The plan of one tensor on one mesh or between two (arXiv 2112.01075).

- `problem`      two types on one mesh as a problem over units (runs of prime sub-axes)
- `space`        the state graph: every type over the units, and the cost of one op between any two
- `search`       exact shortest paths over it
- `emit`         a path as ops; `closed_form` the plan that always exists
- `candidates`   the families that compete
- `choice`       choosing among candidates, chunks under a memory limit
- `single`       the cheapest program of one tensor, on the best placement, and the least limit
"""
