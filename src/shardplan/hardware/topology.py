"""Topologies: the levels of a cluster's hardware, outermost first, and what one device can do.

A level describes how the `size` children of one parent are linked, so the sizes multiply to the number of devices. A
*unit* of level j is one child there; units are numbered over the whole level. A device's *topology id* is the
mixed-radix number of its level digits, outermost most significant: it is the id of that device in every mesh that no
placement lays elsewhere. `str` prints the file format and `parse(str(t)) == t`; the format itself is in
`topology_file.py`, presets are TOML files beside this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardplan.core import validation
from shardplan.core.mesh import MOST_DEVICES
from shardplan.errors import TopologyError, excerpt, near_text
from shardplan.hardware.level import DeviceSpec, Hardware, Level
from shardplan.hardware.prices.library import libraries
from shardplan.hardware.topology_file import load, outside_topologies, parse, presets, to_text


@dataclass(frozen=True, slots=True)
class Topology:
    """Hardware levels, outermost first, and the device at their leaves.

    Invariants: at least one level; level names are unique; degraded units exist; rails are above
    nodes with as many uplinks. Raises `TopologyError`.

    >>> Topology.load("dgx-a100", nodes=2).level_sizes
    (2, 8)
    """

    name: str  # printed with results; may be empty
    levels: tuple[Level, ...]
    device: DeviceSpec = field(default_factory=DeviceSpec)
    library: str = "ring"  # the library model that prices collectives

    def __post_init__(self) -> None:
        validation.text("the name of a topology", self.name, TopologyError)
        if not isinstance(self.levels, tuple) or not all(isinstance(level, Level) for level in self.levels):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(f"topology {self.name!r}: levels is {excerpt(self.levels)}; legal is a tuple of levels")
        if not isinstance(self.device, DeviceSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(f"topology {self.name!r}: device is {excerpt(self.device)}; legal is a DeviceSpec")
        text = validation.text("the library of a topology", self.library, TopologyError)
        named = text.endswith(".toml") or text in libraries()
        if not named:
            legal = f"{', '.join(libraries())}, or the path of a table (.toml)"
            raise TopologyError(f"topology {self.name!r}: library {excerpt(self.library)} is unknown; legal: {legal}")
        if not self.levels:
            raise TopologyError(f"topology {self.name!r} has no levels; it needs at least one")
        if self.size > MOST_DEVICES:
            raise TopologyError(f"topology {self.name!r} has too many devices; a topology has at most {MOST_DEVICES}")
        names = [level.name for level in self.levels]
        for name in names:
            if names.count(name) > 1:
                raise TopologyError(f"topology {self.name!r} names two levels {name!r}; names are unique")
        for j, level in enumerate(self.levels):
            inner = self.levels[j + 1] if j + 2 < len(self.levels) and "node" not in names[: j + 1] else None
            if level.rails and (inner is None or inner.link != "switch" or inner.uplinks != level.uplinks):
                raise TopologyError(
                    f"level {level.name!r}: rails are {level.uplinks} leaf switches in a {level.name}, NIC k of every "
                    f"node on leaf k: legal above a switch of nodes with {level.uplinks} uplinks, whose devices are a "
                    "level of their own"
                )
        count = 1
        for level in self.levels:
            count *= level.size
            for name, unit, _ in level.slow():
                if not 0 <= unit < count:
                    raise TopologyError(
                        f"level {level.name!r}: degraded names {name}, but the whole level has {count} units, 0 to "
                        f"{count - 1}"
                    )

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.level_sizes)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Children of one parent for each level, outermost first."""
        return tuple(level.size for level in self.levels)

    @property
    def strides(self) -> tuple[int, ...]:
        """Devices in one unit of each level: `id // strides[j]` is the number of a device's unit at level j."""
        return tuple(math.prod(self.level_sizes[j + 1 :]) for j in range(len(self.levels)))

    def index(self, name: str) -> int:
        """Return the number of a level, 0 for the outermost; raises `TopologyError` where none has this name."""
        for j, level in enumerate(self.levels):
            if level.name == name:
                return j
        near = near_text(name, [level.name for level in self.levels])
        raise TopologyError(f"topology {self.name!r} has no level {excerpt(name)}; levels: {self.describe()}{near}")

    def describe(self) -> str:
        """Return the levels in one line, such as `node=4 x gpu=8`."""
        return " x ".join(f"{level.name}={level.size}" for level in self.levels)

    def digits(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Return the level digits of topology ids [n], outermost first: int64 [n, L]; errors as of `check_ids`.

        >>> Topology.load("dgx-a100", nodes=2).digits([0, 9]).tolist()
        [[0, 0], [1, 1]]
        """
        flat = self.check_ids(ids).reshape(-1)
        return flat[:, None] // np.array(self.strides) % np.array(self.level_sizes)

    def check_ids(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Return topology ids as int64, in the same shape; raises `TopologyError` for what is none."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (int(array.min()) < 0 or int(array.max()) >= self.size):
            bad = int(array.max()) if int(array.max()) >= self.size else int(array.min())
            raise TopologyError(
                f"device {bad} is not in topology {self.name!r}, whose devices are 0 to {self.size - 1} "
                f"({self.describe()})"
            )
        return array

    def resize(self, **sizes: int | Sequence[int]) -> Topology:
        """Return this topology with levels of other sizes.

        `sizes` has a level's name, or it with an s, and the new number of children; a shape for a torus or mesh. Raises
        `TopologyError` where no level has such a name, or the size does not suit it.

        >>> Topology.load("nominal").resize(devices=6).size
        6
        """
        levels = {level.name: level for level in self.levels}
        for key, value in sizes.items():
            name = key if key in levels else key[:-1] if key.endswith("s") else key
            if name not in levels:
                legal = ", ".join(f"{level.name}s=" for level in self.levels)
                raise TopologyError(f"{key}={excerpt(value)} names no level of topology {self.name!r}; legal: {legal}")
            levels[name] = _resize_level(levels[name], key, value)
        return replace(self, levels=tuple(levels.values()))

    @staticmethod
    def load(source: str | Path, **sizes: int | Sequence[int]) -> Topology:
        """Return the topology of a preset, a TOML file or an NCCL topology XML file.

        Args:
            source: A preset's name, or that of a topology which an installed package brings by an entry point of the
                group `shardplan.topologies`; or a path that ends in `.toml` or `.xml`.
            sizes: As for `resize`: `nodes=4` sets the size of the level called node.

        Raises:
            TopologyError: No such preset or file, or a value breaks an invariant.
            ParseError: The file is malformed.

        >>> Topology.load("dgx-a100", nodes=4).describe()
        'node=4 x gpu=8'
        """
        if not isinstance(source, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(
                f"topology {excerpt(source)}: legal is a preset's name, or a path to a .toml or .xml file"
            )
        new = isinstance(source, str) and Path(source).suffix not in (".toml", ".xml") and source not in presets()
        if new and source in outside_topologies():
            return _outside_topology(str(source), outside_topologies()[str(source)]).resize(**sizes)
        return Topology(*load(source)).resize(**sizes)

    @staticmethod
    def parse(text: str) -> Topology:
        """Read the text of a topology file (TOML), such as `str` prints.

        Raises:
            ParseError: The text is no TOML, or a unit is wrong.
            TopologyError: A key is unknown or missing, or a value breaks an invariant.
        """
        return Topology(*parse(text))

    def __str__(self) -> str:
        return to_text(Hardware(self.name, self.levels, self.device, self.library))


def topology_of(what: str, value: object) -> Topology:
    """Return a topology, given as one or as text: the name of a preset, the path or the text of a topology file.

    It has the size that is given: nothing is resized to fit. `what` names the argument in errors: `TopologyError` for
    another value and where there is no such preset or file, `ParseError` where the text is malformed.

    >>> topology_of("topology", "dgx-h100").name
    'dgx-h100'
    """
    if isinstance(value, str):
        return Topology.parse(value) if "\n" in value else Topology.load(value)
    if not isinstance(value, Topology):
        raise TopologyError(f"{what} is {excerpt(value)}; legal is a Topology, or its text such as 'dgx-h100'")
    return value


def _outside_topology(name: str, value: Any) -> Topology:
    """The topology that a package brings: as one, as the path of a file, or as a function that returns either."""
    found = value() if callable(value) else value
    if isinstance(found, (str, Path)):
        return Topology(*load(found))
    if not isinstance(found, Topology):
        raise TopologyError(
            f"the entry point {name} of shardplan.topologies gives {excerpt(found)}; legal is a Topology or a file's "
            "path"
        )
    return found


def _resize_level(level: Level, key: str, value: int | Sequence[int]) -> Level:
    given = (value,) if isinstance(value, (int, float, str)) or value is None else value  # pyright: ignore[reportUnnecessaryComparison]
    extents = validation.items(key, given, "extents", TopologyError)
    shape = tuple(validation.integer(key, n, TopologyError) for n in extents)
    if level.shape and len(shape) != len(level.shape):
        if level.size == math.prod(shape):
            return level
        raise TopologyError(
            f"{key}={excerpt(value)}: level {level.name!r} is a {level.link} of shape {list(level.shape)}; "
            f"give {len(level.shape)} extents"
        )
    if not level.shape and len(shape) != 1:
        raise TopologyError(f"{key}={excerpt(value)}: level {level.name!r} is a {level.link}; give one size")
    return replace(level, size=math.prod(shape), shape=shape if level.shape else ())
