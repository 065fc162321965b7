"""What `random_problems` judges, on a few problems of the suites that the laws do not draw."""

import pytest
from benchmarks.random_problems import SHARES, Chunk, work

from benchmarks import odd_problems


@pytest.mark.parametrize("suite", odd_problems.SUITES)
def test_plans_of_odd_problems_keep_their_promises(suite: str) -> None:
    name, tally = work(Chunk(suite, 14, 12))
    assert (name, tally.problems, tally.failures) == (suite, 12, [])
    assert tally.run == tally.plans >= 12 and not any(tally.faults.values()) and suite in SHARES


@pytest.mark.parametrize("suite", odd_problems.SUITES)
def test_problems_are_the_same_for_the_same_seed(suite: str) -> None:
    one, other = ([case for _, case in Chunk(suite, 3, 5).cases()] for _ in range(2))
    assert one == other and all(s != t for s, t, _ in one)
