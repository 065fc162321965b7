"""Tile schedules run on a symmetric heap: whose heap, what the ranks agree on, and the run of an epoch.

Reading order:

- `groups`     which heap serves a process group's name
- `agreement`  what every rank says of a call, compared
- `instance`   `FusedInstance`: the memory, counters and epoch of an operator, and the run of an epoch
"""
