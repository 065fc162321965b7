"""A file of layouts, as weights: a mesh, and a layout for every tensor whose name matches a pattern.

    mesh = { data = 2, tensor = 3 }
    [layouts]
    "*.weight" = "[@data, @tensor]"

The first pattern that matches holds, and a tensor that none matches is whole everywhere. Dims need not divide.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from shardplan.core.decoding import decode_toml, read_text
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ParseError, excerpt, line
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights

Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Whole shape and dtype by name."""
_TABLE = ("parameters", "family", "base", "holes", "meshes")


def toml_of(path: Path) -> dict[str, Any]:
    """Return what a TOML file says; raises `ParseError`."""
    try:
        return decode_toml(read_text(path))
    except ParseError as error:
        raise ParseError(f"{line(path)}: {line(error)}; legal is a file of layouts, or a table of weights") from None


def is_layouts(path: Path) -> bool:
    """Whether a file is one of layouts, by its keys, and no table; raises `ParseError` where it is both or neither."""
    data = toml_of(path)
    layouts, table = "layouts" in data, [key for key in _TABLE if key in data]
    if layouts and table:
        raise ParseError(
            f"{line(path)} has [layouts] and {table[0]}; legal is a file of layouts, or a table of weights"
        )
    if not layouts and not table:
        raise ParseError(
            f"{line(path)} has neither [layouts] nor parameters; legal is a file of layouts, or a table of weights"
        )
    return layouts


def layout_weights(path: Path | None, tensors: Tensors) -> Weights:
    """Return the weights of a file of layouts, for tensors by name; without a file, whole on one device.

    Raises `ParseError` and `LayoutError` where the file, or a layout, is malformed or does not fit a tensor.
    """
    axes, patterns = ({}, {}) if path is None else _read(path)
    mesh = Mesh(axes or {"device": 1})
    atoms = {f"d{d}_{n}": n for shape, _ in tensors.values() for d, n in enumerate(shape)}
    logical: dict[str, str] = {}
    parameters: list[dict[str, Any]] = []
    for k, (name, (shape, dtype)) in enumerate(sorted(tensors.items())):
        text = next((t for pattern, t in patterns.items() if fnmatchcase(name, pattern)), None)
        cuts = _cuts(name, shape, dtype, text, mesh, path)
        if "{" in name:
            raise LayoutError(f"tensor {excerpt(name)}: a layout for a name with braces; legal are names without")
        logical[f"t{k}"] = ", ".join(f"d{d}_{n}" for d, n in enumerate(shape))
        dims = [f"d{d}_{n}{''.join(f'@{a}.ceil' for a in cuts[d])}" for d, n in enumerate(shape)]
        parameters.append({"name": name, "is": f"t{k} = {', '.join(dims)}", "dtype": dtype})
    data = {
        "name": "whole tensors" if path is None else path.name,
        "mesh": list(mesh.axes),
        "degrees": mesh.shape,
        "atoms": atoms,
        "of": {"tensors": logical},
        "parameters": parameters,
    }
    where = "the checkpoint" if path is None else str(line(path))
    return make_weights(WeightTable.of(data, where), {}, {}, None, "f32")


def _read(path: Path) -> tuple[dict[str, int], dict[str, str]]:
    data = toml_of(path)
    unknown = [key for key in data if key not in ("version", "mesh", "layouts")]
    axes, layouts = data.get("mesh"), data.get("layouts")
    if unknown or not isinstance(axes, dict) or not all(type(n) is int and n > 0 for n in axes.values()):
        what = f"unknown key {unknown[0]!r}" if unknown else f"mesh = {excerpt(axes)}"
        raise ParseError(f"{line(path)}: {what}; legal are mesh = a table of sizes, and [layouts]")
    if not isinstance(layouts, dict) or not all(isinstance(t, str) for t in layouts.values()):
        raise ParseError(f"{line(path)}: layouts = {excerpt(layouts)}; legal is a table of texts by pattern")
    return axes, layouts


def _cuts(
    name: str, shape: tuple[int, ...], dtype: str, text: str | None, mesh: Mesh, path: Path | None
) -> list[tuple[str, ...]]:
    """Return the axes that cut every dim of a tensor, major first."""
    if text is None:
        return [()] * len(shape)
    where = f"{line(path)}: {name} of shape {list(shape)} has the layout {text!r}"
    legal = "legal is a layout of as many dims, as [@data, @tensor]"
    try:
        layout = Layout.parse(text)
        if layout.partial or layout.root or len(layout.dims) != len(shape):
            raise ParseError(f"{where}; {legal}")
        TensorType(dtype, shape, layout.spec, mesh)  # which checks axes
    except (ParseError, LayoutError) as error:
        raise ParseError(f"{where}: {str(error).splitlines()[0]}; {legal}") from None
    return list(layout.dims)
