"""The shipped tables against what frameworks' own code makes: every ordered pair, random shapes, bit for bit.

One random case a pair here; `python -m benchmarks.weights_pairs` runs twenty.
"""

from __future__ import annotations

import pytest

from movement.weights_cases import PAIRS, TABLES, differing
from shardplan.movement.weights.table import table_files

SEEDS = 1


def test_every_shipped_table_is_tested() -> None:
    tested = {name for tables in TABLES.values() for name in tables}
    assert tested == {*table_files(), *TABLES["qwen3"]}  # of which all but one are Llama's files with other features


@pytest.mark.parametrize(("kind", "a", "b"), PAIRS)
def test_every_pair_moves_bit_for_bit(kind: str, a: str, b: str) -> None:
    for seed in range(SEEDS):
        total, wrong = differing(kind, a, b, seed)
        assert total
        assert wrong == []
