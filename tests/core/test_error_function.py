"""The error function beside that of Python's own library, and the exact GELU that is written with it."""

import math

import numpy as np
import pytest

from shardplan.core.derivative import derivative
from shardplan.core.error_function import erf
from shardplan.core.expression import Expression
from shardplan.core.expression_tree import GELU_EXACT
from shardplan.core.namespace import NUMPY

EDGES = [0.0, -0.0, 1.0, -1.0, np.nextafter(1, 2), 5.9, 6.0, -6.1, 1e300, 1e-300, -np.inf, np.inf]


def test_it_is_within_5e_16() -> None:
    x = np.concatenate([np.random.default_rng(0).normal(0, 2, 20_000), np.linspace(-7, 7, 10_001), EDGES])
    wanted = np.array([math.erf(v) for v in x])
    found = erf(x)
    assert np.abs(found - wanted).max() <= 5e-16
    small = np.abs(x) < 0.1  # where the value is small, it is as near for its size
    assert np.abs(found - wanted)[small].max() <= 5e-16 * 0.12
    assert np.array_equal(np.signbit(found), np.signbit(wanted))
    assert np.isnan(erf(np.array([np.nan])))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_it_keeps_the_dtype_and_shape(dtype: type) -> None:
    x = np.linspace(-2, 2, 12, dtype=dtype).reshape(3, 4)
    assert (erf(x).dtype, erf(x).shape) == (x.dtype, x.shape)
    assert erf(x[0, 0]).shape == ()


def test_the_slope_of_gelu_is_a_density_more() -> None:
    # x Phi(x) has the slope Phi(x) + x phi(x), the distribution and the density of the normal law.
    slope = Expression(derivative(Expression.parse(GELU_EXACT).root, "a"))
    x = np.linspace(-4, 4, 101)
    wanted = [0.5 * math.erfc(-v / math.sqrt(2)) + v * math.exp(-v * v / 2) / math.sqrt(2 * math.pi) for v in x]
    assert np.abs(slope.evaluate(NUMPY, [x], x.dtype) - wanted).max() <= 1e-15
