"""Planning: the cheapest certified program from one layout to another, reductions, and placement.

Redistribution (arXiv 2112.01075):

- `units`       two types on one mesh as a problem over units (runs of prime sub-axes)
- `space`       the state graph: every type over the units, and the cost of one op between any two
- `search`      exact shortest paths over it
- `emit`        a path as ops
- `candidates`  the families that compete, for one tensor on one mesh
- `crossmesh`   moves between meshes: send, relabel, gather behind
- `fit`         choosing among candidates, chunks under a memory limit
- `batch`       many tensors as one plan
- `redistribute` the verb

Reductions and placement (arXiv 2110.10548):

- `instructions`    the paper's language; `state_matrix` its checker, `instruction_run` an interpreter on numbers
- `state_graph`     every state that programs reach, and the programs; `hierarchies` the paper's four
- `reduction_space` the types that reductions go through, as a graph; `reduction_path` the cheapest way
- `payload`         a payload as a type, programs as ops
- `reductions`      the verb: every program up to a size; `reduce` the verb: the best
- `traffic`         what a job communicates; `demand` one collective of it on a placement
- `place`           the verb: placements ranked for a job; `degraded` what slow units cost
- `audit`           a launch that exists against the best placement; `fixes` the better one as text that runs

A certificate is issued by `hardware` and knows nothing of this room.
"""
