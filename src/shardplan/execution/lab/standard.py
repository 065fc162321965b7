"""The standard sweep: experiments drawn at random by a seed that was fixed before anything was measured on them.

`STANDARD` is what `benchmarks.lab_draws.draw_experiments()` returns, half a minute later, and `RATIOS`. Each draw takes
a cluster, a rate for each of its levels, a mesh over its ranks, axes to reduce over and a payload. It is kept where
some placement has more than `MANY_PROGRAMS` programs, so that being right is no luck.
"""

from __future__ import annotations

from shardplan.execution.lab.cluster import Leaf, Rate
from shardplan.execution.lab.experiments import MIB, Experiment

MANY_PROGRAMS = 10  # of a placement: with no more of them the best is always among the first ten
# An all_reduce on the worst placement over that on the best; the best program on a slow outer link.
RATIOS = (
    Experiment("2x4", (50.0, 250.0), "a=2, b=4", ("a",), 2 * MIB),
    Experiment("2x4", (50.0, 500.0), "a=8", ("a",), MIB),
)


def _cells(sizes: str, rates: tuple[Rate, ...], leaf: Leaf, cells: str) -> list[Experiment]:
    """Read cells such as `8 a 1`: axis sizes, reduced axes, MiB; axes are named a, b, c."""
    out: list[Experiment] = []
    for cell in cells.split(","):
        mesh, axes, mib = cell.split()
        named = ", ".join(f"{a}={n}" for a, n in zip("abc", mesh.split("x"), strict=False))
        out.append(Experiment(sizes, rates, named, tuple(axes), int(float(mib) * MIB), leaf))
    return out


STANDARD: tuple[Experiment, ...] = (
    *_cells("2x2x2", ("2*150", 200.0, 400.0), "ns", "4x2 a 1"),
    *_cells("2x2x2", ("4*50", 300.0, 400.0), "ns", "2x2x2 ab 1"),
    *_cells("2x2x2", (400.0, 200.0, 800.0), "ns", "4x2 a 1, 2x2x2 ab 1.5"),
    *_cells("2x3", ("3*75", 300.0), "ns", "6 a 1"),
    *_cells("2x3", ("3*75", 400.0), "ns", "6 a 1"),
    *_cells("2x3", (150.0, 300.0), "ns", "6 a 1"),
    *_cells("2x3", (150.0, 400.0), "ns", "6 a 1"),
    *_cells("2x3", (200.0, 300.0), "ns", "6 a 1, 6 a 1.5"),
    *_cells("2x3", (200.0, 400.0), "ns", "6 a 1, 6 a 1.5"),
    *_cells("2x4", (150.0, 1000.0), "lo", "2x2x2 ab 1, 4x2 a 1"),
    *_cells("2x4", (200.0, 1000.0), "lo", "4x2 a 1, 8 a 1, 8 a 1.5"),
    *_cells("2x4", (250.0, 1000.0), "lo", "8 a 1.5, 8 a 1, 2x2x2 ab 1"),
    *_cells("2x4", ("2*125", 300.0), "ns", "2x2x2 ab 1"),
    *_cells("2x4", ("2*125", 400.0), "ns", "8 a 1.5, 4x2 a 1, 2x2x2 ab 1"),
    *_cells("2x4", ("4*60", 300.0), "ns", "4x2 a 1, 8 a 1, 2x2x2 ab 1"),
    *_cells("2x4", (200.0, 400.0), "ns", "8 a 1.5"),
    *_cells("2x4", (200.0, 500.0), "ns", "4x2 a 1"),
    *_cells("2x4", (250.0, 400.0), "ns", "4x2 a 1, 8 a 1.5"),
    *_cells("2x4", (250.0, 500.0), "ns", "2x2x2 ab 1.5, 8 a 1.5, 2x2x2 ab 1"),
    *_cells("4x2", ("2*100", 300.0), "ns", "4x2 a 1"),
    *_cells("4x2", ("2*100", 400.0), "ns", "2x2x2 ab 1"),
    *_cells("4x2", (150.0, 300.0), "ns", "4x2 a 1"),
    *_cells("4x2", (150.0, 400.0), "ns", "2x2x2 ab 1.5"),
    *_cells("4x2", (200.0, 300.0), "ns", "2x2x2 ab 1"),
    *_cells("4x2", (200.0, 400.0), "ns", "8 a 1"),
    *_cells("4x4", ("2*100", 400.0), "ns", "16 a 1"),
    *RATIOS,
)
