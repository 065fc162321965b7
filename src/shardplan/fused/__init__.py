"""Fused operators: a computation whose tiles leave for their destination as soon as they are there (arXiv 2305.06942).

Reading order:

- `tiles/`      `TileSchedule`: which tile is sent when, who waits for what, and the proof that this is right

This room imports the rooms below it and numpy; torch only inside functions.
"""
