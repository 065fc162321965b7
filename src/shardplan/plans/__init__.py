"""Plans: a program with what is proved of it, and what it costs as a whole.

Reading order:

- `plan`             `Plan`: what redistribute, reduce and reductions return
- `certificate`      `Certificate`: its claims, and their derivation from the program alone
- `plan_file`        plan files, and the annotated print-out
- `pricing`          from a topology or placement to the price of a whole program, and its bound in seconds
- `bounds`           lower bounds in seconds: cut, count and gather; `reduction_bound` those of moves that reduce
- `nominal`          seconds without a topology

This room knows no planner.
"""
