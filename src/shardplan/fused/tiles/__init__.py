"""Tile schedules: in which order a fused kernel computes and sends, what it waits for, and why that is right.

Reading order:

- `events`    `TileProtocol`: what every program of every rank puts, signals, waits for and reads, as data
- `shapes`    what is cut into tiles: `BlockShape`, a block from every rank to every rank; `RowShape`, rows to be summed
- `schedule`  `TileSchedule`: order, tiles, slices, programs and waits; it makes the protocol of a shape
- `generate`  the protocols of both kinds of shape
- `running`   threads that signal and wait, run as far as they get, also with one of them held
- `checker`   what must hold of a protocol: no deadlock, written once, read after written, free before written again
- `symmetry`  the same of a schedule, for every shape at once, on one program and one tile of each kind

A protocol that others wrote is given as `TileProtocol` and tried with `checker.check`.
"""
