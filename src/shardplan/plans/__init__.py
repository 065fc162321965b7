"""Plans: a program with what is proved of it, and what it costs as a whole.

Reading order:

- `nominal`          seconds without a topology
- `starts`           what steps take at the least to carry some bytes
- `bounds`           lower bounds in seconds: senders, receivers, cuts and counts
- `collective_bounds`  those of collectives, at the best rates that a library reaches
- `reduction_bound`  those of moves that reduce
- `pricing`          from a topology or placement to the price of a whole program, and its bound in seconds
- `certificate`      `Certificate`: its claims, and their derivation from the program alone
- `plan_fields`      the fields of a plan file, and what is said where something else stands there
- `plan_file`        plan files, and the annotated print-out
- `plan`             `Plan`: what redistribute, reduce and reductions return

This room knows no planner.
"""
