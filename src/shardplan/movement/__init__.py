"""Planning: the cheapest certified program from one layout to another, reductions, and placement.

Reading order:

- `redistribute`    the verb: one tensor, or a batch (arXiv 2112.01075)
- `redistribution`  the plan of one tensor: candidates, search, choice
- `order`           the order of moves in shared memory that has the least peak
- `better_placement`  what a better placement of a plan's mesh would gain
- `idle_stop`       what a stop on idle devices would gain
- `batches`         many tensors as one plan, and moves between meshes
- `reductions`      the published enumeration and the best reduction over types (arXiv 2110.10548)
- `placing`         placements ranked for the traffic of a job
- `weights`         a model's weights from one framework's storage to another's

A certificate is issued by `plans` and knows nothing of this room.
"""
