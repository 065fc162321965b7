"""The seeded problems of every suite: the single home of the generators.

`problems(suite, seed, count)` yields `(source, destination, keywords)` as `shardplan.redistribute` takes them; a batch
has lists for the ends. The draws take any object with the methods of `random.Random`: property tests share them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError

Ends = TensorType | list[TensorType]
Case = tuple[Ends, Ends, dict[str, Any]]
Names = list[tuple[str, ...]]  # the axes of every dim

SUITES = ("s8", "s16", "U", "P", "S", "N", "V", "M", "B", "L", "R", "X")
LISTS = ("R", "X")  # suites that are fixed lists: `seed` is not read, at most their length is yielded

MESHES: tuple[tuple[int, ...], ...] = (
    (2, 2, 2), (4, 2), (2, 4), (8,), (4, 2, 2), (2, 2, 2, 2), (4, 4), (8, 2), (2, 3, 2), (6, 2), (3, 4, 2), (3, 2, 3),
    (5, 2), (7, 2), (12, 2), (5, 3), (16, 16), (32, 8, 4), (64, 32, 32),
)  # fmt: skip
OF_8: tuple[tuple[int, ...], ...] = ((2, 2, 2), (2, 2, 2), (4, 2), (4, 2), (2, 4), (2, 4), (8,))
OF_16: tuple[tuple[int, ...], ...] = (
    (2, 2, 2, 2), (4, 2, 2), (4, 2, 2), (2, 4, 2), (2, 2, 4), (4, 4), (4, 4), (8, 2), (8, 2), (2, 8), (16,),
)  # fmt: skip
KEEP = 0.82  # s8 and s16: the share of axes that a type uses
REDUCTIONS = ("sum", "sum", "max", "min")


def make_mesh(sizes: Sequence[int], devices: Sequence[int] | None = None) -> Mesh:
    """Return the mesh a=..., b=..., ... of these sizes."""
    return Mesh(dict(zip("abcdefgh", sizes, strict=False)), devices=devices)


def pick_mesh(rng: random.Random, most_devices: int, least_devices: int = 1) -> Mesh:
    """Return one of `MESHES` of at most `most_devices` devices."""
    return make_mesh(rng.choice([m for m in MESHES if least_devices <= math.prod(m) <= most_devices]))


def pick_names(rng: random.Random, axes: Sequence[str], ndim: int, keep: float | None = None) -> Names:
    """Shuffle the axes and append each to a dim, or leave it unused: uniformly, or with probability 1 - `keep`."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    order = list(axes)
    rng.shuffle(order)
    for axis in order:
        if keep is None:
            d = rng.randrange(ndim + 1)
            if d < ndim:
                dims[d].append(axis)
        elif rng.random() < keep:
            dims[rng.randrange(ndim)].append(axis)
    return [tuple(d) for d in dims]


def atoms(mesh: Mesh) -> list[str]:
    """Return the names of all prime sub-axes."""
    return [a.name for a in mesh.atoms]


def cuts(mesh: Mesh, names: Sequence[str]) -> int:
    """Return the number of tiles that the axes make."""
    return math.prod(mesh.span(n).size for n in names)


def even_shape(
    rng: random.Random, mesh: Mesh, several: Sequence[Names], most_multiple: int, other: Mesh | None = None
) -> tuple[int, ...]:
    """Return a shape that all layouts tile evenly: per dim the least such size, times 1 to `most_multiple`."""
    homes = [mesh] * len(several) if other is None else [mesh, other]
    return tuple(
        math.lcm(*(cuts(m, names[d]) for m, names in zip(homes, several, strict=True))) * rng.randint(1, most_multiple)
        for d in range(len(several[0]))
    )


def uneven_shape(rng: random.Random, homes: Sequence[Mesh], several: Sequence[Names]) -> tuple[int, ...]:
    """Return a shape whose dims miss a multiple of their tiles by 1 to that number: trailing shards short or empty."""
    out: list[int] = []
    for d in range(len(several[0])):
        q = max(cuts(m, names[d]) for m, names in zip(homes, several, strict=True))
        out.append(max(1, q * rng.randint(1, 2) + rng.choice((-1, 1)) * rng.randint(1, q)))
    return tuple(out)


def even_pair(
    rng: random.Random,
    mesh: Mesh,
    ndim: int,
    *,
    dtype: str = "f32",
    axes: Sequence[str] | None = None,
    most_multiple: int = 4,
    least: int = 1,
    keep: float | None = None,
) -> tuple[TensorType, TensorType]:
    """Return two even types on one mesh; every dim is a multiple of `least`, too."""
    names = [pick_names(rng, axes or mesh.axes, ndim, keep) for _ in range(2)]
    if least > 1:
        shape = tuple(least * rng.randint(1, most_multiple) for _ in range(ndim))
    else:
        shape = even_shape(rng, mesh, names, most_multiple)
    return TensorType(dtype, shape, names[0], mesh), TensorType(dtype, shape, names[1], mesh)


def uneven_pair(rng: random.Random, mesh: Mesh, ndim: int, dtype: str = "i32") -> tuple[TensorType, TensorType]:
    """Return two types of whole axes on one mesh, of a shape that they tile unevenly."""
    names = [pick_names(rng, mesh.axes, ndim) for _ in range(2)]
    shape = uneven_shape(rng, (mesh, mesh), names)
    return TensorType(dtype, shape, names[0], mesh), TensorType(dtype, shape, names[1], mesh)


def mark(
    rng: random.Random, mesh: Mesh, axes: Sequence[str], partial: float, root: float
) -> tuple[list[str], list[str], list[str]]:
    """Deal axes out: left for the dims, partial, root."""
    out: tuple[list[str], list[str], list[str]] = ([], [], [])
    for a in axes:
        x = rng.random()
        out[1 if x < partial else 2 if x < partial + root else 0].append(a)
    return out


def partial_pair(
    rng: random.Random, mesh: Mesh, ndim: int, *, even: bool = True, most_multiple: int = 3, root: float = 0.1
) -> tuple[TensorType, TensorType]:
    """Return a partial or rooted source and a destination that mostly is neither; at times with two reductions."""
    marks = [mark(rng, mesh, mesh.axes, 0.4, root), mark(rng, mesh, mesh.axes, *rng.choice(((0, 0), (0.25, root))))]
    names = [pick_names(rng, m[0], ndim) for m in marks]
    shape = even_shape(rng, mesh, names, most_multiple) if even else uneven_shape(rng, (mesh, mesh), names)
    first = rng.choice(REDUCTIONS)
    second = first if rng.random() < 0.8 else rng.choice(REDUCTIONS)
    s, t = (
        TensorType("i32", shape, n, mesh, partial=dict.fromkeys(m[1], kind), root=m[2])
        for n, m, kind in zip(names, marks, (first, second), strict=True)
    )
    return s, t


def other_mesh(rng: random.Random, mesh: Mesh, most_devices: int) -> Mesh:
    """Return another mesh: the devices of `mesh` in another order, disjoint, overlapping, or another number of them."""
    how = rng.choice(("order", "order", "disjoint", "overlap", "axes", "count"))
    n = mesh.size
    if how in ("order", "disjoint", "overlap") and rng.random() < 0.5:
        sizes: tuple[int, ...] = mesh.sizes
    else:
        fits = [m for m in MESHES if (math.prod(m) == n if how in ("order", "axes") else math.prod(m) <= most_devices)]
        sizes = rng.choice(fits or [mesh.sizes])
    count = math.prod(sizes)
    ids = list(mesh.devices) if count == n else list(range(count))
    if how == "order":
        rng.shuffle(ids)
    elif how == "disjoint":
        ids = [max(mesh.devices) + 1 + k for k in range(count)]
    elif how in ("overlap", "count"):
        first = rng.randrange(n)
        ids = [first + k for k in range(count)]
    return Mesh(dict(zip("pqrstu", sizes, strict=False)), devices=ids)


def renamed(rng: random.Random, t: TensorType) -> TensorType:
    """Return the same boxes on the same devices under another mesh: its axes in another order, at times other names.

    At times it has an axis of size 1 besides, which a dim may name. Addends may be numbered otherwise.
    """
    order, prefix = rng.sample(t.mesh.axes, len(t.mesh.axes)), rng.choice(("", "", "r"))
    ids = np.array(t.mesh.devices).reshape(t.mesh.sizes).transpose([t.mesh.axes.index(a) for a in order])
    sizes = {prefix + a: t.mesh.shape[a] for a in order}
    names = [tuple(prefix + a for a in dim) for dim in t.layout.dims]
    if rng.random() < 0.3:
        sizes |= {"one": 1}
        if names and rng.random() < 0.5:
            d = rng.randrange(len(names))
            names[d] = (*names[d], "one")
    partial = dict.fromkeys((prefix + a for a in t.layout.partial), t.layout.reduction or "sum")
    mesh = Mesh(sizes, devices=ids.reshape(-1).tolist())
    return TensorType(t.dtype, t.shape, names, mesh, partial=partial, root=tuple(prefix + a for a in t.layout.root))


def ends_pair(rng: random.Random, most_devices: int = 12) -> tuple[TensorType, TensorType]:
    """Return types whose meshes differ in their axes, their order or their devices, and at times in nothing else."""
    mesh = pick_mesh(rng, most_devices)
    if rng.random() < 0.5:
        mesh = make_mesh(mesh.sizes, rng.sample(range(mesh.size), mesh.size))
    ndim, even, marked = rng.randint(1, 3), rng.random() < 0.7, rng.random() < 0.3
    how = rng.choice(("renamed", "renamed", "moved", "other", "same mesh"))
    other = other_mesh(rng, mesh, most_devices) if how == "other" else mesh
    s, t = cross_pair(rng, mesh, other, ndim, even=even, marked=marked)
    return s, renamed(rng, s) if how == "renamed" else renamed(rng, t) if how == "moved" else t


def cross_pair(
    rng: random.Random, mesh: Mesh, other: Mesh, ndim: int, *, even: bool = True, marked: bool = False
) -> tuple[TensorType, TensorType]:
    """Return types on two meshes."""
    marks = [mark(rng, m, m.axes, *((0.2, 0.1) if marked else (0, 0))) for m in (mesh, other)]
    names = [pick_names(rng, m[0], ndim) for m in marks]
    shape = even_shape(rng, mesh, names, 2, other) if even else uneven_shape(rng, (mesh, other), names)
    kind = rng.choice(REDUCTIONS)
    s, t = (
        TensorType("i32", shape, n, home, partial=dict.fromkeys(m[1], kind), root=m[2])
        for n, m, home in zip(names, marks, (mesh, other), strict=True)
    )
    return s, t


def batch(
    rng: random.Random, mesh: Mesh, count: int, most_multiple: int = 2, other: Mesh | None = None
) -> tuple[list[TensorType], list[TensorType]]:
    """Return `count` pairs on one mesh (or from one to another), of a few shapes and layouts, as models have."""
    kinds = max(1, min(count, rng.randint(1, 8)))
    pool: list[tuple[TensorType, TensorType]] = []
    for _ in range(kinds):
        ndim, dtype = rng.randint(1, 3), rng.choice(("i32", "i16", "i32"))
        if other is not None:
            pool.append(cross_pair(rng, mesh, other, ndim))
        elif rng.random() < 0.8:
            pool.append(even_pair(rng, mesh, ndim, dtype=dtype, most_multiple=most_multiple))
        else:
            pool.append(uneven_pair(rng, mesh, ndim, dtype))
    chosen = [rng.choice(pool) for _ in range(count)]
    return [s for s, _ in chosen], [t for _, t in chosen]


def problems(
    suite: str,
    seed: int,
    count: int,
    *,
    most_devices: int = 32,
    most_multiple: int = 4,
    most_tensors: int = 500,
) -> Iterator[Case]:
    """Yield `count` problems of a suite (fewer of a fixed list), the same for the same arguments; never equal ends.

    `most_devices` bounds the meshes, `most_multiple` the dims (multiples of the least even size), `most_tensors` the
    batches. Raises `ValueError` for an unknown suite.
    """
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}; legal are {', '.join(SUITES)}")
    if suite in LISTS:
        yield from (_real() if suite == "R" else _traps())[:count]
        return
    rng = random.Random(f"{suite} {seed}")
    found = 0
    while found < count:
        try:
            case = _draw(suite, rng, most_devices, most_multiple, most_tensors)
        except LayoutError:  # a random layout that no type allows, such as a sub-axis on an uneven dim
            continue
        s, t, _ = case
        if s == t or _mixed(s, t):
            continue
        found += 1
        yield case


def _mixed(s: Ends, t: Ends) -> bool:
    """Whether one axis is partial with two reductions: no question that has an answer."""
    if isinstance(s, list) or isinstance(t, list) or s.mesh != t.mesh:
        return False
    return bool(set(s.layout.partial) & set(t.layout.partial)) and s.layout.reduction != t.layout.reduction


def _draw(suite: str, rng: random.Random, most_devices: int, most_multiple: int, most_tensors: int) -> Case:
    """One problem of a suite."""
    if suite in ("s8", "s16"):
        mesh = make_mesh(rng.choice(OF_8 if suite == "s8" else OF_16))
        pair = even_pair(rng, mesh, rng.choice((2, 3)), most_multiple=most_multiple, least=mesh.size, keep=KEEP)
        return *pair, {}
    mesh, ndim = pick_mesh(rng, most_devices), rng.randint(1, 4)
    most = most_multiple if ndim < 4 else 1
    match suite:
        case "U":
            return *even_pair(rng, mesh, ndim, most_multiple=most), {}
        case "P":
            return *even_pair(rng, mesh, ndim, axes=atoms(mesh), most_multiple=most), {}
        case "S":
            return *_same_size(rng, mesh, max(2, ndim), most), {}
        case "N":
            return *uneven_pair(rng, mesh, min(ndim, 3)), {}
        case "V":
            return *partial_pair(rng, mesh, min(ndim, 3), even=rng.random() < 0.85, most_multiple=most), {}
        case "M":
            even, marked = rng.random() < 0.8, rng.random() < 0.25
            other = other_mesh(rng, mesh, most_devices)
            return *cross_pair(rng, mesh, other, min(ndim, 3), even=even, marked=marked), {}
        case "B":
            tensors = int(math.exp(rng.uniform(0, math.log(most_tensors))))
            other = other_mesh(rng, mesh, most_devices) if rng.random() < 0.2 else None
            return *batch(rng, mesh, tensors, min(most_multiple, 2), other), {}
        case _:  # L
            s, t = even_pair(rng, mesh, ndim, most_multiple=most) if rng.random() < 0.8 else uneven_pair(rng, mesh, 2)
            ends = s.local_bytes() + t.local_bytes()
            return s, t, {"memory_limit": rng.randint(ends, 2 * ends)}


def _same_size(rng: random.Random, mesh: Mesh, ndim: int, most_multiple: int) -> tuple[TensorType, TensorType]:
    """A pair whose shards are equally large."""
    while True:
        s, t = even_pair(rng, mesh, ndim, axes=atoms(mesh), most_multiple=most_multiple)
        if s.local_bytes() == t.local_bytes():
            return s, t


def _pair(mesh: Mesh, source: str, target: str, other: Mesh | None = None) -> Case:
    return TensorType.parse(source, mesh), TensorType.parse(target, other or mesh), {}


def _real() -> list[Case]:
    """Moves of real training and serving jobs, at their real sizes."""
    dp_tp = Mesh(dp=4, tp=8)
    cp = Mesh(data=8, cp=8)
    trainer = Mesh(dp=16, tp=8)
    weight = "bf16[8192@(dp,tp), 28672]"
    out: list[Case] = [
        _pair(dp_tp, weight, "bf16[8192, 28672@tp]"),
        _pair(Mesh(tp=8), "bf16[8192, 28672@tp]", "bf16[8192@tp, 28672]"),
        _pair(Mesh(tp=8), "bf16[8192@tp, 28672]", "bf16[8192, 28672@tp]"),
        _pair(cp, "bf16[8@data, 32768@cp, 64, 128]", "bf16[8@data, 32768, 64@cp, 128]"),
        _pair(cp, "bf16[8@data, 32768, 64@cp, 128]", "bf16[8@data, 32768@cp, 64, 128]"),
        _pair(Mesh(ep=8), "bf16[64@ep, 4096, 14336]", "bf16[64, 4096, 14336@ep]"),
        _pair(Mesh(ep=8), "bf16[64, 4096, 14336@ep]", "bf16[64@ep, 4096, 14336]"),
    ]
    order = [16 * (k % 8) + k // 8 for k in range(128)]
    for devices in (range(128), order, range(128, 256), range(64, 192)):
        serving = Mesh({"replica": 16, "tp": 8}, devices=devices)
        out.append(_pair(trainer, weight, "bf16[8192, 28672@tp]", serving))
    for tensors in (_dense_7b(), _mixture()):
        for devices in (range(128), range(128, 256)):
            serving = Mesh({"replica": 16, "tp": 8}, devices=devices)
            out.append(
                (
                    [TensorType.parse(s, trainer) for s, _ in tensors],
                    [TensorType.parse(t, serving) for _, t in tensors],
                    {},
                )
            )
    return out


def _dense_7b() -> list[tuple[str, str]]:
    """Every tensor of a 7B model of 32 layers, fully sharded in training, tensor parallel in serving."""
    column = [("bf16[4096@(dp,tp), 4096]", "bf16[4096, 4096@tp]")] * 3
    row = [("bf16[4096@(dp,tp), 4096]", "bf16[4096@tp, 4096]")]
    mlp = [("bf16[4096@(dp,tp), 11008]", "bf16[4096, 11008@tp]")] * 2
    down = [("bf16[11008@(dp,tp), 4096]", "bf16[11008@tp, 4096]")]
    norms = [("bf16[4096@(dp,tp)]", "bf16[4096]")] * 2
    ends = [("bf16[32000@(dp,tp), 4096]", "bf16[32000@tp, 4096]")]
    ends += [("bf16[4096@(dp,tp), 32000]", "bf16[4096, 32000@tp]")]
    return (column + row + mlp + down + norms) * 32 + ends + [("bf16[4096@(dp,tp)]", "bf16[4096]")]


def _mixture() -> list[tuple[str, str]]:
    """Every tensor of a mixture-of-experts model of 32 layers and 8 experts."""
    heads = [("bf16[4096@(dp,tp), 4096]", "bf16[4096, 4096@tp]")] * 3 + [
        ("bf16[4096@(dp,tp), 4096]", "bf16[4096@tp, 4096]")
    ]
    experts = [("bf16[8@tp, 4096@dp, 14336]", "bf16[8, 4096, 14336@tp]")] * 2
    experts += [("bf16[8@tp, 14336@dp, 4096]", "bf16[8, 14336@tp, 4096]")]
    return (heads + experts + [("bf16[4096@dp, 8]", "bf16[4096, 8]"), ("bf16[4096@(dp,tp)]", "bf16[4096]")] * 2) * 32


def _traps() -> list[Case]:
    """Problems on which other systems are known to be wrong, wasteful or to fail."""
    square, cube = Mesh(x=4, y=2), Mesh(x=2, y=2, z=2)
    shardy_1, shardy_2 = Mesh(a=2, b=3, c=2), Mesh(a=3, b=4, c=2)
    rotation = "f32[{0}, {1}, {2}]"
    sizes = ("8@x", "8@y", "8@z")
    rotations = [_pair(cube, rotation.format(*sizes), f"f32[{r}]") for r in ("8@y, 8@z, 8@x", "8@z, 8@x, 8@y")]
    order = Mesh({"x": 2, "y": 2, "z": 2}, devices=[0, 4, 2, 6, 1, 5, 3, 7])
    return [
        _pair(square, "f32[8@y, 16, 8@x]", "f32[8, 16@(x,y), 8]"),  # jax issue 21562
        _pair(square, "f32[8@x, 8@y]", "f32[8@y, 8@x]"),  # pytorch issue 134646
        _pair(Mesh(x=3, y=2), "f32[6@x, 6@y]", "f32[6@y, 6@x]"),
        _pair(Mesh(x=4, y=4), "f32[16@x, 16@y]", "f32[16@y, 16@x]"),
        _pair(Mesh(x=2, y=4), "f32[8, 8@(x,y)]", "f32[8@(y,x), 8]"),  # openxla issue 15207: all to all on two axes
        _pair(Mesh(x=2, y=4), "f32[8@(x,y)]", "f32[8@(y,x)]"),
        *rotations,
        _pair(cube, "f32[8@(x,y,z)]", "f32[8@(z,x,y)]"),
        _pair(Mesh(a=2, b=3, c=2), "f32[48, 48, 48@a]", "f32[48, 48@a, 48@(b,c)]"),  # the free-form case
        _pair(shardy_1, "f32[48@(c,a), 48@b]", "f32[48@(b,a), 48@c]"),  # Shardy ends in [48@(a,b), 48@c]
        _pair(shardy_2, "f32[48, 48@(c,a), 48@b]", "f32[48, 48@(b,a), 48@c]"),  # Shardy: size 3 != 6
        _pair(cube, "f32[8@x, 8@y, 8@z]", "f32[8@x, 8@y, 8@z]", order),
        _pair(Mesh(x=3, y=4), "f32[7@x, 5@y]", "f32[7@y, 5@x]"),  # uneven, with empty shards
        _pair(Mesh(x=1, y=3), "f32[1@y, 3@x]", "f32[1@x, 3@y]"),  # size 1
    ]


def shrunk(s: TensorType, t: TensorType) -> tuple[TensorType, TensorType]:
    """Return the same move on the smallest array that its layouts tile evenly (an unsharded dim has 2 elements)."""
    shape: list[int] = []
    for d in range(s.ndim):
        least = math.lcm(*(cuts(x.mesh, x.layout.dims[d]) for x in (s, t)))
        shape.append(least if least > 1 else min(2, s.shape[d]))
    return TensorType(s.dtype, shape, s.layout, s.mesh), TensorType(t.dtype, shape, t.layout, t.mesh)


__all__ = ["LISTS", "MESHES", "SUITES", "Case", "Layout", "problems", "shrunk"]
