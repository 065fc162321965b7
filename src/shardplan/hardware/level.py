"""`Level` and `DeviceSpec`: how the children of one parent are linked, and what one device can do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from shardplan.core import validation
from shardplan.errors import TopologyError, excerpt

Link = Literal["switch", "ring", "torus", "mesh", "full"]


@dataclass(frozen=True, slots=True)
class Level:
    """One hardware level: how the children of one parent are linked.

    A child of a `full` level has a port to each of its siblings. On *rails* port k of a child is the uplink of a switch
    of its own, its leaf k, on which port k of every unit inside hangs: NIC k of every node of a pod. What goes from
    leaf to leaf goes over their uplinks, inside one child too.

    Invariants: `size` >= 1; `shape` multiplies to `size` for `torus` and `mesh`, and is empty for any other link; only
    ports of a switch are slow one by one; on rails a child has several. Raises `TopologyError` where a value breaks
    one.
    """

    name: str  # of one child, such as `node`
    size: int  # children of one parent
    link: Link
    bandwidth: float  # bytes per second of one port of a child, in each direction
    latency: float  # seconds of one message over this level
    uplinks: int = 1  # ports that a child has on a switch; on other links, parallel links of each linked pair
    shape: tuple[int, ...] = ()  # extents of a torus or mesh
    source: str = ""  # where the numbers come from
    degraded: tuple[tuple[int, float], ...] = ()  # pairs of a unit and the factor on its bandwidth, above 0, at most 1
    reduces: bool = False  # whether the switch reduces in the network
    efficiency: float = 1.0  # part of the bandwidth that a library reaches, above 0, at most 1
    slow_ports: tuple[tuple[int, int, float], ...] = ()  # a unit, one of its uplinks, and the factor on its bandwidth
    rails: bool = False  # whether every uplink of a child is that of a switch of its own

    def __post_init__(self) -> None:
        where = f"level {excerpt(self.name)}"
        if not (isinstance(self.name, str) and self.name.isidentifier()):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(f"{where}: a level's name is a word of letters, digits and underscores, such as 'node'")
        if self.link not in get_args(Link):
            raise TopologyError(f"{where}: link {excerpt(self.link)} is unknown; legal: {', '.join(get_args(Link))}")
        self._check_kinds(where)
        if self.size < 1:
            raise TopologyError(f"{where}: size {self.size} is below 1, the least number of children")
        if self.uplinks < 1:
            raise TopologyError(f"{where}: uplinks {self.uplinks} is below 1; a child needs a port")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise TopologyError(f"{where}: bandwidth {self.bandwidth} bytes per second is not positive and finite")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise TopologyError(f"{where}: latency {self.latency} seconds is negative or not finite")
        if not 0 < self.efficiency <= 1:
            raise TopologyError(f"{where}: efficiency {self.efficiency} is not above 0 and at most 1")
        grid = self.link in ("torus", "mesh")
        if grid and (not self.shape or math.prod(self.shape) != self.size or min(self.shape) < 1):
            got = f"shape {list(self.shape)} has product {math.prod(self.shape)}" if self.shape else "no shape is given"
            raise TopologyError(f"{where}: a {self.link} of size {self.size} needs a shape of that product; {got}")
        if not grid and self.shape:
            raise TopologyError(
                f"{where}: a {self.link} takes no shape, got {list(self.shape)}; only torus and mesh do"
            )
        if self.reduces and self.link != "switch":
            raise TopologyError(f"{where}: only a switch reduces in the network, this is a {self.link}")
        if self.rails and (self.link != "switch" or self.uplinks == 1):
            raise TopologyError(
                f"{where}: rails are the uplinks of a child, one for each of its leaf switches; legal is a switch with "
                f"several uplinks, this is a {self.link} with {self.uplinks}"
            )
        if self.slow_ports and (self.link != "switch" or self.uplinks == 1):
            raise TopologyError(
                f"{where}: degraded names a port, {self.name}[{self.slow_ports[0][0]}].{self.slow_ports[0][1]}; only a "
                f"switch with several uplinks has ports that are slow one by one, this is a {self.link} with "
                f"{self.uplinks}"
            )
        for unit, port, _ in self.slow_ports:
            if not 0 <= port < self.uplinks:
                raise TopologyError(
                    f"{where}: degraded names {self.name}[{unit}].{port}, but a unit has the ports 0 to "
                    f"{self.uplinks - 1}"
                )
        seen: set[str] = set()
        for name, _, factor in self.slow():
            if name in seen:
                raise TopologyError(f"{where}: degraded names {name} twice")
            seen.add(name)
            if factor <= 0:
                raise TopologyError(
                    f"{where}: degraded factor {factor} leaves {name} unreachable; legal: above 0, at most 1"
                )
            if not factor <= 1:
                raise TopologyError(f"{where}: degraded factor {factor} of {name} is above 1")
        object.__setattr__(self, "degraded", tuple(sorted(self.degraded)))
        object.__setattr__(self, "slow_ports", tuple(sorted(self.slow_ports)))

    def slow(self) -> Iterator[tuple[str, int, float]]:
        """Yield what is slow, a whole unit (`node[2]`) or one port (`node[2].5`): its name, its unit and the factor."""
        for unit, factor in self.degraded:
            yield f"{self.name}[{unit}]", unit, factor
        for unit, port, factor in self.slow_ports:
            yield f"{self.name}[{unit}].{port}", unit, factor

    def sound(self) -> Level:
        """Return the level with nothing slow."""
        return replace(self, degraded=(), slow_ports=())

    def _check_kinds(self, where: str) -> None:
        """Refuse a value of another kind than its field's."""
        for name in ("size", "uplinks"):
            validation.integer(f"{where}: {name}", getattr(self, name), TopologyError)
        for name in ("bandwidth", "latency", "efficiency"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
                raise TopologyError(f"{where}: {name} is {excerpt(value)}; legal is a number in SI units")
        for extent in validation.items(f"{where}: shape", self.shape, "extents", TopologyError):
            validation.integer(f"{where}: an extent", extent, TopologyError)
        for name, of in (("degraded", "(unit, factor)"), ("slow_ports", "(unit, port, factor)")):
            for row in validation.items(f"{where}: {name}", getattr(self, name), f"rows {of}", TopologyError):
                if not isinstance(row, tuple) or len(row) != of.count(",") + 1:
                    raise TopologyError(f"{where}: {name} has {excerpt(row)}; legal are rows {of}")
                *numbers, factor = row
                for number in numbers:
                    validation.integer(f"{where}: a number in {name}", number, TopologyError)
                if isinstance(factor, bool) or not isinstance(factor, (int, float, np.number)):
                    raise TopologyError(f"{where}: the degraded factor {excerpt(factor)} is no number")
        for name in ("reduces", "rails"):
            validation.flag(f"{where}: {name}", getattr(self, name), TopologyError)
        validation.text(f"{where}: source", self.source, TopologyError)

    @property
    def delivered_rate(self) -> float:
        """The bytes per second of a port, or a link, that arrive."""
        return self.bandwidth * self.efficiency

    @property
    def extents(self) -> tuple[int, ...]:
        """The shape of the children: `shape` of a torus or mesh, else `(size,)`."""
        return self.shape or (self.size,)


@dataclass(frozen=True, slots=True)
class KernelShares:
    """What kernels reach of a device's rates: measured, else all of it. Raises `TopologyError` for other values.

    `half` is the size at which a dim of a product takes as long again.
    """

    product: float = 1.0  # of the operations per second, in large products
    attention: float = 1.0  # of them, in long forward attention with heads of 128
    stream: float = 1.0  # of the memory bandwidth
    half: float = 0.0  # elements
    queries: float = 128.0  # that a processor has at once in attention

    def __post_init__(self) -> None:
        for name in ("product", "attention", "stream", "half", "queries"):
            value = validation.number(f"device: kernels: {name}", getattr(self, name), TopologyError)
            if name != "half" and not value > 0:
                raise TopologyError(f"device: kernels: {name} is {excerpt(value)}, it must be above 0")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What one device can do, infinite where it is unstated.

    Raises `TopologyError` where a value is not positive (`launch`, `issue`: negative), or a dtype is named twice.
    """

    flops: tuple[tuple[str, float], ...] = ()  # pairs of dtype and operations per second; `*` stands for every dtype
    memory: float = math.inf  # bytes
    memory_bandwidth: float = math.inf  # bytes per second
    launch: float = 0.0  # seconds to start a kernel or a collective
    kernels: KernelShares = KernelShares()
    processors: int = 0  # that have a tile of a kernel at once; 0 where it is unstated
    issue: float | None = None  # seconds in which its host issues one, whoever runs; `launch` where it is unstated

    @property
    def issue_seconds(self) -> float:
        """The seconds in which its host issues a kernel or a collective."""
        return self.launch if self.issue is None else self.issue

    def __post_init__(self) -> None:
        for pair in validation.items(
            "device: flops", self.flops, "pairs (dtype, operations per second)", TopologyError
        ):
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
                raise TopologyError(
                    f"device: flops has {excerpt(pair)}; legal are pairs (dtype, operations per second)"
                )
        names = [dtype for dtype, _ in self.flops]
        if len(set(names)) != len(names):
            raise TopologyError(f"device: flops names a dtype twice: {', '.join(names)}")
        values: list[tuple[str, object]] = [*self.flops, ("memory", self.memory)]
        values.append(("memory_bandwidth", self.memory_bandwidth))
        for name, value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not value > 0:
                raise TopologyError(f"device: {name} is {excerpt(value)}, it must be above 0")
        validation.number("device: launch", self.launch, TopologyError)
        validation.number("device: issue", self.issue_seconds, TopologyError)
        validation.whole_number("device: processors", self.processors, 0, kind=TopologyError)
        if not isinstance(self.kernels, KernelShares):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(f"device: kernels is {excerpt(self.kernels)}; legal is KernelShares")

    def peak(self, dtype: str) -> float:
        """Return the operations per second for a dtype; raises `TopologyError` where none are stated.

        `f16` and `bf16` stand for each other, `f8` for `f8...`, and `f4` for `f4...`.
        """
        found = self._stated_flops(dtype)
        if found is None:
            stated = ", ".join(name for name, _ in self.flops) or "none"
            raise TopologyError(f"device: no flops are stated for {dtype!r}; stated: {stated}")
        return found

    def rate(self, dtype: str) -> float:
        """Return the operations per second for a dtype, infinite where none are stated."""
        return self._stated_flops(dtype) or math.inf

    def _stated_flops(self, dtype: str) -> float | None:
        table = dict(self.flops)
        names = (dtype, {"f16": "bf16", "bf16": "f16"}.get(dtype, dtype[:2]), "*")
        return next((table[name] for name in names if name in table), None)


class Hardware(NamedTuple):
    """What a file says of a topology: its fields, levels outermost first."""

    name: str
    levels: tuple[Level, ...]
    device: DeviceSpec
    library: str = "ring"
