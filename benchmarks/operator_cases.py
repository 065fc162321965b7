"""What is asked of DTensor: operators of PyTorch's database, or moves, on tensors with random placements.

Everything is drawn from a seed in text, alike on every rank. Shards are cut here by index, without a message and
without the package that is tested.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
import types
import unittest
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.utils import _pytree as pytree

MESHES = {2: ((2,),), 4: ((4,), (2, 2)), 8: ((8,), (2, 4), (2, 2, 2))}
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.uint8)
MOVED = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)
MOST_ELEMENTS = 4096
MOST_SAMPLES = 40
KINDS = ("sum", "sum", "sum", "avg", "max", "min", "product")
OPERATOR, INPUTS, ORDERS = "operator", "inputs", "orders"


@functools.cache
def database() -> list[Any]:
    """PyTorch's operators; its helpers want `expecttest` for a base class of tests, of which there are none here."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ModuleNotFoundError:
            stand_in: Any = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def named(operator: Any) -> str:
    """The name of an operator with that of its variant."""
    return f"{operator.name}.{operator.variant_test_name}" if operator.variant_test_name else operator.name


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: an operator (its place in the database), the move of its inputs, or a move from order to order."""

    kind: str
    operator: int  # of `ORDERS`: the place of the pair of orders
    number: int
    mesh: int
    seed: str


@dataclass(frozen=True, slots=True)
class Placed:
    """How a tensor lies: placements without strides, the order of the mesh dims of each tensor dim, and how to say it.

    `strided` says it in placements (`_StridedShard`), otherwise it stands in the spec (`shard_order`).
    """

    placements: tuple[Any, ...]
    order: tuple[ShardOrderEntry, ...] = ()
    strided: bool = False

    def spec(self, mesh: Any, like: torch.Tensor) -> DTensorSpec:
        """The spec of a tensor of this shape that lies like this."""
        meta = TensorMeta(like.shape, like.stride(), like.dtype)
        if self.strided:
            return DTensorSpec(mesh, self.said(mesh), tensor_meta=meta)
        return DTensorSpec(mesh, self.placements, tensor_meta=meta, shard_order=self.order)

    def said(self, mesh: Any) -> tuple[Any, ...]:
        """The placements as DTensor's API takes them."""
        if not self.strided:
            return self.placements
        return DTensorSpec._convert_shard_order_to_StridedShard(self.order, self.placements, mesh)

    @property
    def usual(self) -> bool:
        """Whether dims nest in the order of the mesh dims."""
        return all(list(e.mesh_dims) == sorted(e.mesh_dims) for e in self.order)


@dataclass(slots=True)
class Problem:
    """A call, the tensors that it takes, and how they lie; `call` takes them plain or distributed."""

    call: Callable[[list[Any]], Any]
    plain: Callable[[list[Any]], Any]
    fulls: list[torch.Tensor]
    places: list[Placed]
    mesh: Any
    seed: str
    about: str
    gradient: bool = False
    random: bool = False  # plain tensors give another result with another seed
    empty: bool = False  # values are what memory held
    targets: list[Placed] = field(default_factory=list)

    def distributed(self, rank: int) -> list[DTensor]:
        """The tensors as leaves of a graph, made anew."""
        out = []
        for k, (full, placed) in enumerate(zip(self.fulls, self.places, strict=True)):
            x = laid(full, self.mesh, placed, f"{self.seed} {k}")
            out.append(x.requires_grad_(full.requires_grad and self.gradient))
        return out

    def copies(self) -> list[torch.Tensor]:
        """The tensors themselves, as leaves."""
        return [x.detach().clone().requires_grad_(x.requires_grad and self.gradient) for x in self.fulls]


def drawn(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, mesh: Any, partial: bool = True) -> Placed:
    """Random placements: any dim, whether it divides or not, in any order; now and then partial."""
    dims = [d for d, n in enumerate(shape) if n > 0]
    kind = rng.choice(KINDS if dtype.is_floating_point else ("sum", "max", "min"))
    partial = partial and dtype != torch.bool and not dtype.is_complex and rng.random() < 0.35
    places: list[Any] = []
    for _ in range(mesh.ndim):
        if partial and rng.random() < 0.5:
            places.append(Partial(kind))
        else:
            places.append(Shard(rng.choice(dims)) if dims and rng.random() < 0.65 else Replicate())
    return ordered(rng, tuple(places))


def ordered(rng: random.Random, places: tuple[Any, ...]) -> Placed:
    """The placements with a random order of the mesh dims of each tensor dim."""
    by_dim: dict[int, list[int]] = {}
    for k, p in enumerate(places):
        if isinstance(p, Shard):
            by_dim.setdefault(p.dim, []).append(k)
    for axes in by_dim.values():
        rng.shuffle(axes)
    order = tuple(ShardOrderEntry(d, tuple(axes)) for d, axes in sorted(by_dim.items()))
    usual = all(list(e.mesh_dims) == sorted(e.mesh_dims) for e in order)
    return Placed(places, order, strided=not usual and rng.random() < 0.5)


def part(full: torch.Tensor, mesh: Any, placed: Placed) -> torch.Tensor:
    """This rank's shard, cut dim by dim in the order of the mesh dims, in chunks of equal size but for the last."""
    if placed.strided:  # uneven chunks follow a rule of DTensor's own: ask it
        cut = [Replicate() if isinstance(p, Partial) else p for p in placed.said(mesh)]
        return distribute_tensor(full, mesh, cut, src_data_rank=None)._local_tensor.clone()
    x, coordinate = full, mesh.get_coordinate()
    for entry in placed.order:
        for k in entry.mesh_dims:
            n = x.shape[entry.tensor_dim]
            size = -(-n // mesh.size(k))
            start = min(n, size * coordinate[k])
            x = x.narrow(entry.tensor_dim, start, min(size, n - start))
    return x.clone()


def laid(full: torch.Tensor, mesh: Any, placed: Placed, seed: str) -> DTensor:
    """`full` (alike on all ranks) as a DTensor; the addends of a partial one are no two alike and reduce to it."""
    full = full.detach()
    spec = placed.spec(mesh, full)
    local = part(addend(full, mesh, placed, seed), mesh, placed)
    x = DTensor.from_local(
        _strided_like(local, full), mesh, placed.said(mesh), run_check=False, shape=full.shape, stride=full.stride()
    ).detach()
    x._spec = spec
    return x


def addend(full: torch.Tensor, mesh: Any, placed: Placed, seed: str) -> torch.Tensor:
    """What this rank's coordinate on the partial dims holds of `full`: each element's value lies with one of them."""
    axes = [k for k, p in enumerate(placed.placements) if isinstance(p, Partial)]
    if not axes:
        return full
    kind, coordinate, count, here = placed.placements[axes[0]].reduce_op, mesh.get_coordinate(), 1, 0
    for k in axes:
        here, count = here * mesh.size(k) + coordinate[k], count * mesh.size(k)
    generator = torch.Generator().manual_seed(random.Random(seed).randrange(2**31))
    owner = torch.randint(0, count, full.shape, generator=generator)
    value = full * count if kind == "avg" else full
    other = {
        "sum": torch.zeros_like(full),
        "avg": torch.zeros_like(full),
        "product": torch.ones_like(full),
        "max": full - 1,
        "min": full + 1,
    }[kind]
    return torch.where(owner == here, value, other)


def _strided_like(local: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """The shard with its dims in memory as those of the full tensor."""
    order = sorted(range(full.ndim), key=lambda d: -full.stride(d))
    back = sorted(range(full.ndim), key=order.__getitem__)
    return local.permute(order).contiguous().permute(back)


# Operators.


@functools.lru_cache(maxsize=2)
def samples(operator: int, dtype: torch.dtype, seed: int) -> list[Any]:
    """The sample inputs of an operator that DTensor can hold, those with more to shard first."""
    torch.manual_seed(seed)
    random.seed(seed)
    op = database()[operator]
    gradient = bool(op.supports_autograd and (dtype.is_floating_point or dtype.is_complex))
    found = []
    for s in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradient), MOST_SAMPLES):
        tensors = [x for x in pytree.tree_leaves((s.input, s.args, s.kwargs)) if isinstance(x, torch.Tensor)]
        if tensors and all(map(_held, tensors)) and sum(x.numel() for x in tensors) <= MOST_ELEMENTS:
            found.append((min(8, max(x.numel() for x in tensors)), s))
    order = random.Random(seed)
    order.shuffle(found)
    return [s for _, s in sorted(found, key=lambda pair: -pair[0])]


def _held(x: torch.Tensor) -> bool:
    """Whether a tensor holds its values as they are, so that it can be distributed."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and not (
        x.is_quantized or x.is_conj() or x.is_neg() or x.is_nested
    )  # fmt: skip


def dtypes(operator: Any) -> list[torch.dtype]:
    """A float and an integer type where the operator takes both, else the first that it takes."""
    legal = [t for t in DTYPES if t in operator.dtypes]
    return legal[:2] if legal[:2] == list(DTYPES[:2]) else legal[:1]


def problem(case: Case, meshes: list[Any]) -> Problem | None:
    """The problem of a case on this rank; None where the database has no such sample."""
    mesh, rng = meshes[case.mesh], random.Random(f"{case}")
    if case.kind == ORDERS:
        return _orders(case, mesh, rng)
    op = database()[case.operator]
    kinds = dtypes(op)
    if not kinds:
        return None
    dtype = kinds[1] if len(kinds) > 1 and case.number % 3 == 2 else kinds[0]
    chosen = samples(case.operator, dtype, 20)
    if not chosen:
        return None
    sample = chosen[case.number % len(chosen)]
    leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    fulls = [_dense(leaves[k]) for k in at]
    places = [drawn(rng, tuple(x.shape), x.dtype, mesh) for x in fulls]
    gradient = any(x.requires_grad for x in fulls)

    def call(tensors: list[Any]) -> Any:
        given = list(leaves)
        for k, x in zip(at, tensors, strict=True):
            given[k] = x
        first, args, named_args = pytree.tree_unflatten(given, tree)
        return sample.output_process_fn_grad(op(first, *args, **named_args))

    about = f"{dtype} {[list(x.shape) for x in fulls]} on {tuple(mesh.mesh.shape)}: {_texts(places)}"
    if case.kind == OPERATOR:
        return Problem(call, call, fulls, places, mesh, str(case), about, gradient)
    targets = [drawn(rng, tuple(x.shape), x.dtype, mesh, partial=False) for x in fulls]
    targets = [_kept(rng, a, b) for a, b in zip(places, targets, strict=True)]
    return _move(fulls, places, targets, mesh, str(case), gradient)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor without expanded or overlapping dims; the order of its dims in memory stays."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _kept(rng: random.Random, source: Placed, target: Placed) -> Placed:
    """The target, now and then partial where the source is."""
    places = [
        p if isinstance(p, Partial) and rng.random() < 0.2 else q
        for p, q in zip(source.placements, target.placements, strict=True)
    ]
    return ordered(rng, tuple(places))


# Moves.


def _move(
    fulls: list[torch.Tensor], places: list[Placed], targets: list[Placed], mesh: Any, seed: str, gradient: bool
) -> Problem:
    """Each tensor to its target: by `DTensor.redistribute` where that can say it, else as PyTorch's own tests do."""

    def call(tensors: list[Any]) -> Any:
        out = []
        for x, target, full in zip(tensors, targets, fulls, strict=True):
            if target.strided or target.usual:
                out.append(x.redistribute(mesh, target.said(mesh)))
            else:
                spec = target.spec(mesh, full)
                local = _redistribute.redistribute_local_tensor(x._local_tensor, x._spec, spec)
                out.append(DTensor(local, spec, requires_grad=False))
        return out

    about = "; ".join(
        f"{x.dtype} {list(x.shape)} {_text(a)} -> {_text(b)}" for x, a, b in zip(fulls, places, targets, strict=True)
    )
    about = f"on {tuple(mesh.mesh.shape)}: {about}"
    return Problem(call, list, fulls, places, mesh, seed, about, gradient, targets=targets)


@functools.cache
def orders(mesh_ndim: int, ndim: int) -> list[tuple[tuple[Any, ...], tuple[ShardOrderEntry, ...]]]:
    """All ways to shard a tensor over all or some of the mesh dims, in all orders: placements and order."""
    found = []
    for where in itertools.product([None, *range(ndim)], repeat=mesh_ndim):
        places = tuple(Replicate() if d is None else Shard(d) for d in where)
        used = sorted({d for d in where if d is not None})
        axes = [[k for k, e in enumerate(where) if e == d] for d in used]
        for way in itertools.product(*(itertools.permutations(a) for a in axes)):
            found.append((places, tuple(ShardOrderEntry(d, a) for d, a in zip(used, way, strict=True))))
    return found


def _orders(case: Case, mesh: Any, rng: random.Random) -> Problem:
    """From the order at the case's place to a random one; successive cases go through all of them."""
    number, ndim = divmod(case.number, 3)
    ndim += 1
    ways = orders(mesh.ndim, ndim)
    shape = [rng.choice((1, 2, 3, 5, 7, mesh.size(), 2 * mesh.size(), 11)) for _ in range(ndim)]
    dtype = rng.choice(MOVED)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    full = torch.randint(-60, 60, shape, generator=generator).to(dtype)
    if dtype.is_floating_point:
        full.requires_grad_()
    pair = [Placed(*ways[number % len(ways)]), Placed(*rng.choice(ways))]
    if rng.random() < 0.5:
        pair.reverse()
    source, target = (Placed(p.placements, p.order, not p.usual and rng.random() < 0.4) for p in pair)
    return _move([full], [source], [target], mesh, str(case), full.requires_grad)


def _texts(places: list[Placed]) -> str:
    return "; ".join(map(_text, places))


def _text(p: Placed) -> str:
    """A placement, and its order where it is not the usual one."""
    order = "" if p.usual else f" {'strided' if p.strided else 'in'} order {[(e[0], e[1]) for e in p.order]}"
    return f"({', '.join(map(str, p.placements))}){order}"


def weights(outputs: list[torch.Tensor], seed: str) -> list[torch.Tensor]:
    """Gradients of results, alike on all ranks and in all ways of running."""
    generator = torch.Generator().manual_seed(random.Random(f"{seed} gradient").randrange(2**31))
    return [
        torch.randint(-3, 4, tuple(x.shape), generator=generator).to(x.dtype)
        if math.prod(x.shape) or not x.dim()
        else torch.zeros(tuple(x.shape), dtype=x.dtype)
        for x in outputs
    ]
