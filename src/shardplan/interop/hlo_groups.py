"""The devices that an HLO collective names, in the three spellings of `replica_groups`.

Explicit lists (`{{0,1},{2,3}}`), iota (`[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`), and named meshes with sub-axes
(`mesh['x'=2,'y'=4], device_ids=([2,2,2]T(0,2,1)) {'y':(2)2}`, as `MeshAxesReplicaGroupList::ToString` writes them).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from shardplan.errors import ParseError, excerpt

Groups = tuple[tuple[int, ...], ...]  # device ids, in member order
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\(([^{]*)\))?\s*\{([^}]*)\}")
MOST_DEVICES = 2**20  # of a module
_MOST_DIGITS = 18  # of a number
_MOST_DIMS = 32  # of a list of devices
_IOTA_IDS = re.compile(r"\s*\[([\d,]+)\]\s*(?:T\(([\d,]+)\))?\s*")


def parse_groups(attributes: str, devices: int) -> Groups:
    """Return the groups that the attributes of an instruction name, members in order; all devices where they name none.

    >>> parse_groups("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", 8)
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    everyone = (tuple(range(devices)),)
    if found := _LISTS.search(attributes):
        return tuple(integers_in(inner) for inner in re.findall(r"\{([^}]*)\}", found[1])) or everyone
    if found := _IOTA.search(attributes):
        ids = _iota(found[1])
        if ids.ndim != 2:
            raise ParseError(f"replica_groups={found[1]} is a list of {ids.ndim} dims; legal are two, as [4,2]<=[8]")
        return _rows(ids)
    if found := _MESH.search(attributes):
        return _mesh_groups(found[1], found[2], found[3])
    if "replica_groups=" in attributes:
        position = attributes.index("replica_groups=")
        raise ParseError("replica_groups in an unknown spelling", attributes.strip(), position)
    return everyone


def integers_in(text: str) -> tuple[int, ...]:
    """Return the integers in a text.

    >>> integers_in("{1,2}")
    (1, 2)
    """
    return tuple(integer(n) for n in re.findall(r"\d+", text))


def integer(digits: str) -> int:
    """Return the integer of some digits; raises `ParseError` where they are too many."""
    if len(digits) > _MOST_DIGITS:
        raise ParseError(f"a number of {len(digits)} digits in HLO text; legal are at most {_MOST_DIGITS}")
    return int(digits)


def _count_devices(lengths: Sequence[int], text: str) -> int:
    """The devices of a list with these dims; raises `ParseError` where they are too many."""
    count = math.prod(lengths)
    if not 0 < count <= MOST_DEVICES or len(lengths) > _MOST_DIMS:
        raise ParseError(
            f"{excerpt(text)} has {count:.3g} devices in {len(lengths)} dims; legal are 1 to {MOST_DEVICES}"
        )
    return count


def _mesh_groups(mesh: str, device_ids: str | None, group_axes: str) -> Groups:
    """Groups over some axes of a named mesh, sub-axes `'x':(m)k` being k chunks below m chunks of x."""
    sizes = {name: integer(size) for name, size in re.findall(r"'?([^,'=\s]+)'?=(\d+)", mesh)}
    _count_devices(list(sizes.values()), mesh)
    found = re.findall(r"'?([^,':\s]+)'?(?::\((\d+)\)(\d+))?", group_axes)
    if strange := [name for name, _, _ in found if name not in sizes]:
        raise ParseError(f"replica_groups over the axis {excerpt(strange[0])}; the mesh has {', '.join(sizes)}")
    wanted = [(name, integer(major or "1"), integer(size) if size else sizes[name]) for name, major, size in found]
    # Every axis becomes the run of its parts, cut at the ends of the wanted sub-axes; a group then spans whole parts.
    parts: list[tuple[str, int]] = []
    lengths: list[int] = []
    for name, size in sizes.items():
        ends = sorted({1, size} | {end for axis, major, k in wanted if axis == name for end in (major, major * k)})
        if any(not start or stop % start for start, stop in itertools.pairwise(ends)) or ends[-1] > max(size, 1):
            raise ParseError(f"replica_groups over parts of the axis {excerpt(name)} of size {size}; legal divide it")
        for start, stop in itertools.pairwise(ends):
            parts.append((name, start))
            lengths.append(stop // start)
    if device_ids is None:
        ids = np.arange(math.prod(sizes.values()))
    else:
        ids = _iota(device_ids).reshape(-1) if "[" in device_ids else np.array(integers_in(device_ids))
    if ids.size != math.prod(lengths):
        raise ParseError(f"device_ids {excerpt(device_ids)} has {ids.size} devices; the mesh has {math.prod(lengths)}")
    chosen: list[int] = []
    for axis, major, k in wanted:
        chosen += [i for i, (name, start) in enumerate(parts) if name == axis and major <= start < major * k]
    rest = [i for i in range(len(parts)) if i not in chosen]
    q = math.prod(lengths[i] for i in chosen)
    return _rows(ids.reshape(lengths).transpose(rest + chosen).reshape(-1, q))


def _iota(text: str) -> np.ndarray:
    """`[g,q]<=[d0,d1,...]T(p0,...)`: the ids 0.. in shape d, transposed by p, in shape [g,q] (where one is given)."""
    shape, _, source = text.rpartition("<=")
    found = _IOTA_IDS.fullmatch(source)
    if not found:
        raise ParseError(f"{text!r} is no iota list of devices, such as [4,2]<=[2,4]T(1,0)")
    dims = integers_in(found[1])
    ids = np.arange(_count_devices(dims, text)).reshape(dims)
    order = integers_in(found[2]) if found[2] else tuple(range(len(dims)))
    into = integers_in(shape.strip("[] ")) if shape else tuple(dims[i] for i in order if i < len(dims))
    if sorted(order) != list(range(len(dims))) or _count_devices(into, text) != ids.size:
        raise ParseError(f"{excerpt(text)} does not permute its dims, or has two numbers of devices")
    return ids.transpose(order).reshape(into)


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in ids)
