"""What all ranks of a call hold together: every rank brings its part, and all get the whole, or the same error.

The names and the meshes of a state differ from rank to rank: the norms of FSDP2 x TP lie on a submesh of their own,
and a stage of a pipeline has other layers. What the ranks bring is joined in a tree, without the store; after that each
of them makes the same plans from the same facts, those that only receive too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrder, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from shardplan.errors import LayoutError
from shardplan.execution.rank_names import format_ranks
from shardplan.interop.torch.state.names import Layouts, Path, name_of, unmatched_error

MOST_MESHES = 256  # remembered, of all states that were moved


@dataclass(frozen=True, slots=True)
class Grid:
    """A device mesh as a value: a mesh itself has process groups, and cannot go to another rank."""

    kind: str  # of devices
    shape: tuple[int, ...]
    ranks: tuple[int, ...]  # in mesh order
    names: tuple[str, ...] | None  # of its dims

    @staticmethod
    @lru_cache(maxsize=MOST_MESHES)  # a mesh makes the tensor of its ranks at every look
    def of(mesh: DeviceMesh) -> Grid:
        """Return the value of a mesh."""
        ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
        return Grid(mesh.device_type, tuple(mesh.mesh.shape), ranks, mesh.mesh_dim_names)

    @lru_cache(maxsize=MOST_MESHES)  # noqa: B019  # a mesh holds a tensor
    def mesh(self) -> DeviceMesh:
        """Return a mesh without process groups, for planning."""
        ranks = torch.tensor(self.ranks).reshape(self.shape)
        return DeviceMesh(self.kind, ranks, mesh_dim_names=self.names, _init_backend=False)


TensorKey = tuple[Path, Grid]  # where a tensor is in the state; other meshes may have one of that name


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor lies, as a value: what a `DTensorSpec` has."""

    grid: Grid
    placements: tuple[Placement, ...]
    order: ShardOrder | None  # None where `strided`
    strided: bool | None  # whether `_StridedShard`s say an order of sharding
    meta: TensorMeta

    @staticmethod
    def of(spec: DTensorSpec) -> Source:
        """Return the value of a spec."""
        if spec.tensor_meta is None:
            raise LayoutError("the DTensor's spec has no global shape")
        order = None if spec.use_strided_shard_as_shard_order else spec.shard_order
        return Source(
            Grid.of(spec.mesh), spec.placements, order, spec.use_strided_shard_as_shard_order, spec.tensor_meta
        )

    def spec(self, mesh: DeviceMesh) -> DTensorSpec:
        """Return the spec on its mesh."""
        return DTensorSpec(
            mesh, self.placements, self.meta, shard_order=self.order,  # pyright: ignore[reportArgumentType]
            use_strided_shard_as_shard_order=self.strided,
        )  # fmt: skip

    def __str__(self) -> str:
        """Say it in a few words."""
        placements, ranks = ", ".join(map(repr, self.placements)), format_ranks(self.grid.ranks)
        return f"{placements} of {tuple(self.meta.shape)} on ranks {ranks}"


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the state: where it lies, how it is wanted, what it is tied to, whether it outlives the state."""

    source: Source
    wanted: tuple[Placement, ...]
    tie: Path | None  # None where no rank so far could say
    kept: bool


@dataclass(frozen=True, slots=True)
class StateView:
    """What some ranks hold together, and what they asked for."""

    asked: Mapping[str, str]  # all else that has to be the same on every rank, by its keyword
    held: dict[TensorKey, Held] = field(default_factory=dict[TensorKey, Held])
    matched: dict[str, str] = field(default_factory=dict[str, str])  # patterns, and the first DTensor that each matches
    plain: dict[str, str] = field(default_factory=dict[str, str])  # the same of other tensors
    surplus: int = 0  # bytes beyond those of the shards, on the worst rank
    error: str = ""

    def __add__(self, other: StateView) -> StateView:
        """Return both together; what does not fit becomes the error."""
        error = self.error or other.error
        held = dict(self.held)
        try:
            for keyword, text in self.asked.items():
                if text != other.asked[keyword]:
                    raise LayoutError(
                        f"redistribute_state: {keyword}={text} on one rank and {other.asked[keyword]} on another; "
                        "legal is one value on every rank"
                    )
            for key, theirs in other.held.items():
                held[key] = theirs if key not in held else _join_held(key[0], held[key], theirs)
        except LayoutError as conflict:
            error = error or str(conflict)
        return StateView(
            self.asked, held, other.matched | self.matched, other.plain | self.plain,
            max(self.surplus, other.surplus), error,
        )  # fmt: skip

    def check(self, layouts: Layouts) -> None:
        """Raise what went wrong on any rank, or the first pattern that matches nothing on all of them."""
        if self.error:
            raise LayoutError(self.error)
        for pattern in layouts:
            if pattern not in self.matched:
                raise unmatched_error(pattern, (name_of(path) for path, _ in self.held), self.plain.get(pattern))


def _join_held(path: Path, a: Held, b: Held) -> Held:
    """Join what two ranks say of a tensor."""
    if (a.source, a.wanted) != (b.source, b.wanted):
        raise LayoutError(
            f"{name_of(path)}: {a.source} to {a.wanted} for one rank, {b.source} to {b.wanted} for another; legal is "
            "one tensor under one name"
        )
    if a.tie is not None and b.tie is not None and a.tie != b.tie:
        raise LayoutError(
            f"{name_of(path)}: tied to {name_of(a.tie)} on one rank and to {name_of(b.tie)} on another; legal is one "
            "storage under the same names on every rank"
        )
    return replace(a, tie=b.tie if a.tie is None else a.tie, kept=a.kept or b.kept)


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """One tensor that moves: under which names, from where, to where."""

    keys: tuple[TensorKey, ...]  # in the view; several where it is tied, or where meshes hold copies of it
    source: DTensorSpec
    target: DTensorSpec
    kept: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return name_of(self.keys[0][0])

    @property
    def paths(self) -> tuple[Path, ...]:
        """Its paths, each once."""
        return tuple(dict.fromkeys(path for path, _ in self.keys))


def moved_tensors(
    view: StateView, device_mesh: DeviceMesh | None, own: Mapping[Grid, DeviceMesh]
) -> tuple[MovedTensor, ...]:
    """Return what has to move of what all ranks hold, the same on every rank, tied tensors and copies as one.

    `device_mesh` is the destination's for all of them, if there is one; `own` are the meshes of this rank, which its
    results are to have. Raises `LayoutError` for tied tensors that are wanted in two layouts, and one name on meshes
    that cannot hold copies of it.
    """
    groups: dict[Any, list[TensorKey]] = {}
    for key, held in view.held.items():
        first = held.tie or key[0]
        # without a mesh for all, a name on several meshes is a tensor on each of them
        groups.setdefault(first if device_mesh is not None else (first, key[1]), []).append(key)
    out: list[MovedTensor] = []
    for keys in groups.values():
        found = [view.held[key] for key in keys]
        wanted = found[0].wanted
        for key, held in zip(keys, found, strict=True):
            if held.wanted != wanted:
                raise LayoutError(
                    f"{name_of(keys[0][0])} and {name_of(key[0])} are one tensor, but {wanted} is wanted for the one "
                    f"and {held.wanted} for the other; legal is one layout for both"
                )
        sources = tuple(dict.fromkeys(h.source for h in found))
        whole = sources[0] if len(sources) == 1 else _stack_copies(name_of(keys[0][0]), sources)
        source = whole.spec(own.get(whole.grid) or whole.grid.mesh())
        target = DTensorSpec(device_mesh or source.mesh, wanted, tensor_meta=whole.meta)
        if len(sources) > 1 or not in_place(source, target):
            out.append(MovedTensor(tuple(keys), source, target, any(h.kept for h in found)))
    return tuple(out)


def in_place(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Say whether a tensor is where it is wanted."""
    return (source.mesh, source.placements, source.shard_order) == (target.mesh, target.placements, target.shard_order)


def _stack_copies(name: str, sources: tuple[Source, ...]) -> Source:
    """Return the copies on several meshes as one tensor that is replicated over them."""
    first = sources[0]
    ranks = tuple(r for s in sources for r in s.grid.ranks)
    alike = all(replace(s, grid=replace(s.grid, ranks=first.grid.ranks)) == first for s in sources)
    if not alike or len(set(ranks)) < len(ranks):
        places = ", and ".join(map(str, sources))
        raise LayoutError(
            f"{name}: held on several meshes, {places}; legal are copies in one layout on meshes that share no rank"
        )
    names = None if first.grid.names is None else ("copies", *first.grid.names)
    order = first.order and tuple(ShardOrderEntry(e.tensor_dim, tuple(k + 1 for k in e.mesh_dims)) for e in first.order)
    grid = Grid(first.grid.kind, (len(sources), *first.grid.shape), ranks, names)
    return replace(first, grid=grid, placements=(Replicate(), *first.placements), order=order)


def copies(moving: Iterable[MovedTensor]) -> list[MovedTensor]:
    """Return the tensors that several meshes hold, each a copy."""
    return [i for i in moving if len({grid for _, grid in i.keys}) > 1]


def digests(
    copied: Iterable[MovedTensor], tensors: Mapping[Path, torch.Tensor], rank: int
) -> dict[tuple[Path, int], str]:
    """Return a digest of this rank's shard of every copied tensor, by path and the rank's place in its mesh."""
    out: dict[tuple[Path, int], str] = {}
    for item in copied:
        for path, grid in item.keys:
            if rank in grid.ranks and path in tensors:
                data = tensors[path].contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
                out[path, grid.ranks.index(rank)] = hashlib.sha256(data).hexdigest()
    return out


def same_digests(a: dict[tuple[Path, int], str], b: dict[tuple[Path, int], str]) -> dict[tuple[Path, int], str]:
    """Join two such tables; digests that differ leave an empty one."""
    return a | b | {key: "" for key in a.keys() & b.keys() if a[key] != b[key]}


def refuse_unlike(table: Mapping[tuple[Path, int], str]) -> None:
    """Raise `LayoutError` where copies of a tensor have unlike values."""
    unlike = dict.fromkeys(name_of(path) for (path, _), digest in table.items() if not digest)
    if unlike:
        raise LayoutError(
            f"{', '.join(unlike)}: held on several meshes with other values on each; legal is one tensor under one name"
        )
