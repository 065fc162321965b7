"""The sizes of a stage's axes of many strategies, as `Strategy.axes` has them of one."""

from __future__ import annotations

import numpy as np

from shardplan.simulation.closed.configurations import CODES, Configurations
from shardplan.strategy.held_cuts import EXPERTS_FROM, SHARING
from shardplan.strategy.model import Model

Ints = np.ndarray


def deal_degrees(model: Model, c: Configurations) -> dict[str, Ints]:
    """Return the sizes of a stage's axes but for `replica`: arrays [n] by axis."""
    col = c.columns
    heads = {n for p in model.parameters.values() for dim, n in p.dims if dim == "kv_heads"}
    tensor = col["tensor"].copy()
    for n in heads:
        tensor = np.where(n < col["tensor"], np.gcd(tensor, n), tensor)
    whole = {"data": c.sharing, "context": col["context"], "tensor": tensor, "group": col["tensor"] // tensor}
    parts = {axis: np.ones_like(tensor) for axis in whole}
    experts = any("experts" in dims for dims in model.dims.values())
    for code, first in enumerate(CODES["expert_from"]):
        left = np.where(col["expert_from"] == code, col["expert"], 1) if experts else parts["data"]
        for axis in EXPERTS_FROM[first]:
            part = np.gcd(left, whole[axis])  # 1 where another order is said
            left, parts[axis] = left // part, parts[axis] * part
    found: dict[str, Ints] = {}
    for axis, n in whole.items():
        found |= {axis: n // parts[axis], SHARING[axis]: parts[axis]}
    return found
