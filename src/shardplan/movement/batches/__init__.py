"""Many tensors as one plan, and moves between meshes.

Reading order:

- `tiles`      the smaller tiles that a send may carry to another mesh, ranked, and the gathers behind it
- `crossings`  the candidates of one tensor between two meshes: send, relabel, gather behind
- `idle_peers` moves over idle peers of the senders
- `packing`    tensors in packs of equal moves, packs in groups
- `schedules`  when the steps of packs run: side by side, in waves; and the program of it
- `batch`      the plan of many tensors: the cheapest of these, or the order of least peak
"""
