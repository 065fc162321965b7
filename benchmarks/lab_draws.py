"""Draws the experiments of the lab's standard sweep (`execution/lab/standard.py`), and is asked for nothing else.

A draw takes a cluster, a rate for each of its levels, a mesh over its ranks, axes to reduce over and a payload. It is
kept where some placement has more than `MANY_PROGRAMS` programs, so that being right is no luck, and where it takes at
most `LONGEST` seconds for each of these, as predicted. All clusters get equally many such placements, as far as they
go.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from shardplan.execution.lab.cluster import Leaf, Rate
from shardplan.execution.lab.experiments import MIB, Experiment, competitors
from shardplan.execution.lab.session import duration
from shardplan.execution.lab.standard import MANY_PROGRAMS

SEED = 20261122
FIELDS = 66  # placements with more programs than that, at least
LONGEST = 55.0  # seconds that an experiment may take for each such placement
DRAWS = 150  # of a cluster, at most


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster to draw from: by level the rates, outermost first."""

    sizes: str
    rates: tuple[tuple[Rate, ...], ...]
    payloads: tuple[float, ...] = (1, 1.5)  # MiB of every device
    leaf: Leaf = "ns"


# Two cores carry about 2 Gbit/s of all ranks together: inner rates are below what real nodes have over outer ones.
CLUSTERS = (
    Shape("2x4", ((150.0, 200.0, 250.0), (400.0, 500.0))),
    Shape("2x4", (("2*75", "2*100", "2*125", "4*50", "4*60"), (300.0, 400.0))),
    Shape("4x2", ((150.0, 200.0, "2*75", "2*100"), (300.0, 400.0))),
    Shape("2x2x2", ((200.0, "2*100", "2*150", "4*50"), (200.0, 300.0, "2*100", "2*150"), (400.0, 500.0))),
    Shape("2x3", ((150.0, 200.0, "3*50", "3*75"), (300.0, 400.0))),
    Shape("4x4", ((150.0, "2*75", "2*100", "4*50"), (300.0, 400.0)), payloads=(1,)),
)
# Clusters on which a flat ring beats every hierarchy: easy cases flatter a model.
CROSSED = (
    Shape("2x4", ((150.0, 200.0, 250.0), (1000.0,)), leaf="lo"),
    Shape("2x2x2", ((400.0,), (200.0,), (800.0,))),
)


def draw_experiments(
    seed: int = SEED, fields: int = FIELDS, shapes: Sequence[Shape] = (*CLUSTERS, *CROSSED)
) -> list[Experiment]:
    """Return the experiments of a seed, shape by shape."""
    draw = random.Random(seed)
    share = math.ceil(fields / len(shapes))
    found: dict[Experiment, None] = {}
    for shape in shapes:
        have = 0
        for one in _draws(shape, draw):
            if one in found:
                continue
            competing, seconds = _size(one)
            if competing and seconds <= LONGEST * competing:
                found[one] = None
                have += competing
            if have >= share:
                break
    return list(found)


def _draws(shape: Shape, draw: random.Random) -> Iterator[Experiment]:
    """Yield experiments on a cluster, with repetition."""
    ranks = math.prod(int(n) for n in shape.sizes.split("x"))
    chosen = [(over, beside) for n in range(2, ranks + 1) if ranks % n == 0
              for over in _factorings(n) for beside in _factorings(ranks // n)]  # fmt: skip
    # Reduced over everything, all meshes are the same.
    chosen = [(over, beside) for over, beside in chosen if len(over + beside) <= 3 and (beside or len(over) == 1)]
    for _ in range(DRAWS):
        rates = tuple(draw.choice(level) for level in shape.rates)
        over, beside = draw.choice(chosen)
        mesh = ", ".join(f"{a}={n}" for a, n in zip("abc", over + beside, strict=False))
        axes = tuple("abc"[: len(over)])
        yield Experiment(shape.sizes, rates, mesh, axes, int(draw.choice(shape.payloads) * MIB), shape.leaf)


def _factorings(n: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """Yield the factorings of n into factors of at least `least`, ascending."""
    if n == 1:
        yield ()
    for first in range(least, n + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in _factorings(n // first, first))


@cache
def _size(experiment: Experiment) -> tuple[int, float]:
    """The placements on which more than `MANY_PROGRAMS` programs compete, and about how many seconds it takes."""
    programs: Counter[str] = Counter()
    seconds = 0.0
    for where, one, _ in competitors(experiment):
        programs[where.describe()] += 1
        seconds += duration(one.seconds)
    return sum(n > MANY_PROGRAMS for n in programs.values()), seconds


def competing(experiments: Sequence[Experiment]) -> int:
    """Return on how many placements of experiments more than `MANY_PROGRAMS` programs compete."""
    return sum(_size(e)[0] for e in experiments)
