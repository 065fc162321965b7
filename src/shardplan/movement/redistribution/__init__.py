"""The plan of one tensor on one mesh or between two (arXiv 2112.01075).

Reading order:

- `space`        the state graph: every type over runs of prime sub-axes, and the cost of one op between any two
- `problem`      two types on one mesh as a state graph and two of its states, and states as types again
- `search`       shortest paths over a state graph: the cheapest, and the one with the smallest steps
- `emit`         a path as ops, and the direct exchange
- `closed_form`  the ops that always lead from one even type to another, without a search
- `candidates`   the op sequences that compete: paths under several objectives and bounds, and what needs no search
- `reduced`      candidates that reduce, cut at the levels of the hardware
- `choice`       the price of a program, the cheapest of the candidates, and its chunks under a memory limit
- `single`       the cheapest program of one tensor on the best placement, and the least limit that works
"""
