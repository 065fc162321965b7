"""Placements ranked for the traffic of a job (arXiv 2110.10548).

- `traffic`    what a job communicates; `demand` one collective of it on a placement
- `place`      the verb: placements with their price, best first; `degraded` what slow units cost
"""
