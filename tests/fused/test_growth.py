"""Memory of results that vary in size: given up as they grow, and right all the same."""

from importlib.util import find_spec

import pytest
from tests.fused.forked import run

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: shardplan[triton]")


@pytest.mark.parametrize("given", ["cpu 1000", pytest.param("triton 40", marks=needs_triton)])
def test_what_lives_is_two_and_a_half_of_the_largest_result(given: str) -> None:
    """A thousand shapes of M growing by 64; in the interpreter few, of which counters are the larger part."""
    for each in run("growth_child", *given.split(), seconds=200):
        assert each["wrong"] == 0 and each["again"] and each["zero"]
        if given.startswith("cpu"):
            assert 2 < each["live"] <= 2.5 and each["used"] <= 4.5
