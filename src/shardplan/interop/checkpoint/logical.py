"""Where an element of a stored parameter stands in the model: a logical tensor, and an index of every atom of it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from shardplan.errors import ShardplanError
from shardplan.interop.checkpoint.windows import PiecesOf, WindowPart
from shardplan.movement.weights.logical import LogicalDim
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights

_PLAIN = re.compile(r"d(\d+)_\d+\Z")  # an atom of a tensor that has no table; see `layouts`
LogicalPlace = tuple[str, tuple[tuple[str, int], ...]]
"""A tensor, and the index of every atom of it, in order of its dims; see `logical_place`."""


def logical_place(weights: Weights, rank: int, number: int, at: int) -> LogicalPlace | None:
    """Return where an element stands: of the parameter of this number in `names(rank)`, `at` in C order.

    Of a tensor without a table the name is its own and the atoms are "". None for padding, and where the logical
    tensors cannot be stored one by one.
    """
    try:
        whole = _one_by_one(weights)
        plan = refit(whole, weights)
        found = plan.regions(rank)
    except ShardplanError:
        return None
    pieces = PiecesOf(found.select_regions(found.target == rank))
    hit = next(pieces.pieces_within(WindowPart(number, at, at + 1, 0)), None)
    if hit is None:
        return None
    row, _, _, _, flat, _ = hit
    name, _, numbers = whole.names(whole.devices[0])[int(pieces.regions.source_parameter[row])].partition(".")
    tensor = weights.tensors[name]
    inside = iter(
        np.unravel_index(flat, [n for n, d in zip(tensor.extents, tensor.dims, strict=True) if not _is_in_name(d)])
    )
    named = iter(map(int, filter(None, numbers.split("."))))
    index = [next(named) if _is_in_name(d) else int(next(inside)) for d in tensor.dims]
    out: list[tuple[str, int]] = []
    for dim, i in zip(tensor.dims, index, strict=True):
        sizes = [weights.sizing[a] for a in dim.atoms]
        out += zip(dim.atoms, map(int, np.unravel_index(i, sizes) if sizes else ()), strict=True)
    if out and all(_PLAIN.match(a) for a, _ in out):
        return weights.families[plan.moves[int(pieces.regions.move[row])].target_family].entry.name, tuple(
            ("", i) for _, i in out
        )
    return name, tuple(out)


def place_text(place: LogicalPlace) -> str:
    """Return a place as text.

    >>> place_text(("k", (("l", 1), ("d", 7)))), place_text(("lm_head.weight", (("", 3),)))
    ('k[l=1, d=7]', 'lm_head.weight[3]')
    """
    name, index = place
    return f"{name}[{', '.join(f'{atom}={i}' if atom else str(i) for atom, i in index)}]"


def _is_in_name(dim: LogicalDim) -> bool:
    """Whether a dim stands in the name where tensors are stored one by one: one with a range."""
    return bool(dim.first or dim.stop or dim.step)


def _one_by_one(weights: Weights) -> Weights:
    """Return weights of one device that store every logical tensor whole, under its own name."""
    parameters: list[dict[str, Any]] = []
    holes: dict[str, str] = {}
    for family in weights.families:
        for name in family.tensors:
            if all(p["name"].partition(".")[0] != name for p in parameters):
                found = weights.tensors[name].dims
                dims = ["1" if not d.atoms else f"({' '.join(d.atoms)})" for d in found if not _is_in_name(d)]
                path = "".join(f".{{{d.atoms[0]}}}" for d in found if _is_in_name(d))
                holes |= {d.atoms[0]: d.atoms[0] for d in found if _is_in_name(d)}
                parameters.append({"name": name + path, "is": f"{name} = {', '.join(dims)}", "dtype": family.dtype})
    table = weights.table
    of: dict[str, Any] = {"tensors": dict(table.tensors)}
    of["scales"] = {name: {"of": other, "block": list(block)} for name, other, block in table.scales}
    data: dict[str, Any] = {
        "name": "logical tensors",
        "mesh": ["device"],
        "degrees": {"device": 1, **{k: v for k, v in weights.degrees.items() if k != "device"}},
        "atoms": dict(table.atoms),
        "of": of,
        "holes": holes,
        "parameters": parameters,
    }
    return make_weights(WeightTable.of(data, "the logical tensors"), dict(weights.config), {}, None, weights.dtype)
