"""Placements ranked for the traffic of a job (arXiv 2110.10548).

Reading order:

- `traffic`          what a job communicates
- `demand`           one collective of it on a placement: its program, its seconds, its bound
- `placement_price`  a placement with its price
- `degradation`      what slow units cost, and whether renaming devices helps
- `place`            the verb: every placement of a mesh, best first
"""
