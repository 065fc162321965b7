"""Fused operators: a computation whose tiles leave for their destination as soon as they are there (arXiv 2305.06942).

Reading order:

- `tiles/`      `TileSchedule`: which tile is sent when, who waits for what, and the proof that this is right
- `heap/`       `SymmetricHeap`: memory of the same layout on every rank, which every rank can write on every other

This room imports the rooms below it and numpy; torch only inside functions.
"""
