"""Bytes of an element of a parameter, of its gradient and of the optimizer's state, by precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.simulation.closed.kernel_classes import narrow_bytes

Floats = np.ndarray
# Bytes of a parameter, of its accumulated gradient and of the optimizer's state; and the dtype of its products.
_RECIPES: Mapping[str | None, tuple[float, float, float, str]] = {
    None: (4.0, 4.0, 8.0, ""),
    "fp32": (4.0, 4.0, 8.0, "f32"),
    "bf16": (2.0, 4.0, 12.0, "bf16"),
    "fp16": (2.0, 2.0, 12.0, "f16"),
    "fp8": (2.0, 4.0, 12.0, "f8"),
    "nvfp4": (2.0, 4.0, 12.0, "f4"),
}
MASTER_BYTES = 4.0  # of a parameter that the optimizer updates itself; of a narrower one it updates a copy
_MOMENTS = 8.0  # of the state: two numbers in f32, as Adam has them
_SIZES: Mapping[str | None, float] = {None: 0.0, "f16": 2.0, "bf16": 2.0, "f32": 4.0, "f64": 8.0}  # None: not said


def recipe(name: str | None) -> tuple[float, float, float, str]:
    """Return bytes of a parameter, its gradient's sum and its state in the optimizer, and the products' dtype."""
    return _RECIPES[name]


class ElementBytes(NamedTuple):
    """Bytes of a parameter, of its gradient as it is accumulated and as it is summed over devices, and of its state."""

    parameter: Floats
    gradient: Floats
    summed: Floats
    state: Floats

    @property
    def has_master(self) -> Floats:
        """Where the optimizer updates a copy of a parameter in f32, bool [n]: where that is narrower."""
        return self.parameter < MASTER_BYTES


def element_bytes(c: Configurations, moments: float = 1.0) -> ElementBytes:
    """Return the bytes of an element, [n] each, under an optimizer that keeps so much of what Adam does."""
    table = np.array([_RECIPES[name][:3] for name in CODES["precision"]])[c.columns["precision"]]
    gradient, summed = (
        np.array([_SIZES[name] for name in CODES[field]])[c.columns[field]]
        for field in ("gradient_dtype", "reduce_dtype")
    )
    gradient = np.where(gradient > 0, gradient, table[:, 1])
    return ElementBytes(table[:, 0], gradient, np.where(summed > 0, summed, gradient),
                        table[:, 2] - _MOMENTS * (1 - moments))  # fmt: skip


def cast_bytes(c: Configurations) -> Floats:
    """Return the bytes that an element of a parameter takes to be cast for narrow products, once a step, [n]."""
    found = [narrow_bytes(_RECIPES[name][3]) for name in CODES["precision"]]
    width = np.array(found)[c.columns["precision"]]
    return (width > 0) * (element_bytes(c).parameter + 2 * width)
