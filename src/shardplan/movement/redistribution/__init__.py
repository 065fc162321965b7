"""The plan of one tensor on one mesh or between two (arXiv 2112.01075).

Reading order:

- `space`                the state graph: every type over runs of prime sub-axes, and the cost of one op between any two
- `pool`                 the types around a few others, where all are too many
- `problem`              two types on one mesh as a state graph and two of its states, and states as types again
- `tile_graph`           the same graph with the costs of its true tiles, where dims are uneven
- `search`               shortest paths over a state graph: the cheapest, and the one with the smallest steps
- `counting`             paths whose steps are counted where the prices of the graph are estimates
- `emit`                 a path as ops, and the direct exchange
- `closed_form`          the ops that always lead from one even type to another, without a search
- `orders`               the same move on meshes that order the prime factors of an axis otherwise
- `fallback_candidates`  what is searched beside the graph: wider pools, coarser runs, other orders
- `cuts`                 steps in chunks: what a program needs by how many
- `limits`               paths that keep memory limits, found once for a problem
- `candidates`           the op sequences that compete: paths under several objectives, and what needs no search
- `reducing_candidates`  candidates that reduce, cut at the levels of the hardware
- `choice`               what candidates must satisfy, the price of a program, and the cheapest of them
- `single_move`          the cheapest program of one tensor on the best placement, within a limit or without
"""
