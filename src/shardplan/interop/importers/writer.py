"""`FlatWriter`: a program while it is imported, by any framework's table; views are laid out where a step needs it.

A dim of a parameter that turns out to be heads times the size of a head, or three projections side by side, is asked
for in these factors (`wanted`): the importer then writes the program again with a parameter that has them as dims, and
nothing is reshaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from string import ascii_letters
from typing import NamedTuple

import numpy as np

from shardplan.core.dtypes import itemsize, numpy_dtype, short_name
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.op import Op
from shardplan.core.ops import Cast, Constant, Einsum, Elementwise, Expand, Iota, ReduceDims, Reshape
from shardplan.core.ops.ring_rounds import MASKED
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError
from shardplan.interop.importers.views import BROADCAST, AtomView, AxisFactor, Descent, Group, refinement, size_of

ONE = Mesh()
Cuts = Mapping[tuple[str, int], tuple[int, ...]]  # by a parameter's name in a checkpoint and its dim there


def finite(value: float, dtype: str) -> float:
    """Return a number; an infinity is a large one of its dtype."""
    large = isinstance(value, float) and math.isinf(value) and numpy_dtype(dtype).kind in "fV"
    return math.copysign(6e4 if dtype == "f16" else -MASKED, value) if large else value


class Stored(NamedTuple):
    """A parameter: its shape in a checkpoint, and each dim's factors."""

    file: str
    factors: tuple[tuple[int, ...], ...]


class FlatWriter:
    """Steps that were written, inputs, parameters by the names of their inputs, and dims that have a meaning."""

    def __init__(self, cuts: Cuts, opaque: bool = False, training: bool = False) -> None:
        self.cuts, self.wanted = cuts, dict[tuple[str, int], tuple[int, ...]]()
        self.opaque, self.training = opaque, training
        self.numbers = count()  # of bodies
        self.opaques = 0
        self.builder = ProgramBuilder({})
        self.inputs: dict[str, AtomView] = {}
        self.parameters: dict[str, Stored] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.scalars: dict[str, float] = {}  # constants without dims
        self.meanings: list[tuple[str, tuple[str | None, ...]]] = []
        self.hoisted: set[int] = set()  # numbers of steps that stand before all others: they are constants
        self.places: dict[str, str] = {}  # by what a step makes where the source makes it
        self.tables: list[tuple[str, str]] = []  # whose rows are looked up, and by which ids

    def begin_body(self) -> FlatWriter:
        """Begin a body, whose parameters, what is asked of them, and constants are those of this writer."""
        inner = FlatWriter(self.cuts, self.opaque, self.training)
        inner.parameters, inner.wanted, inner.numbers = self.parameters, self.wanted, self.numbers
        inner.constants = self.constants
        return inner

    def stop_gradient(self, v: AtomView) -> AtomView:
        """The same value, through which no gradient goes; itself where there are no gradients."""
        return AtomView(self.builder(Elementwise("a"), v.name, stopped=(0,)), v.dims) if self.training else v

    def input(self, name: str, dtype: str, shape: Sequence[int]) -> AtomView:
        """Declare an input."""
        self.builder.types[name] = TensorType(dtype, tuple(shape), (), ONE)
        self.inputs[name] = AtomView(name, tuple((AxisFactor(n, d),) for d, n in enumerate(shape)))
        return self.inputs[name]

    def declare_constant(self, array: np.ndarray) -> AtomView:
        """Declare an input whose value the source has; once, however often the source has it."""
        for name, held in self.constants.items():
            if held.dtype == array.dtype and held.shape == array.shape and held.tobytes() == array.tobytes():
                return self.inputs.get(name) or self.input(name, short_name(held.dtype), held.shape)
        name = f"constant.{len(self.constants)}"
        self.constants[name] = array
        return self.input(name, short_name(array.dtype), array.shape)

    def parameter(self, name: str, file: str, dtype: str, shape: Sequence[int]) -> AtomView:
        """Declare a parameter, with a dim for each factor that is known."""
        factors = tuple(self.cuts.get((file, d), (n,)) for d, n in enumerate(shape))
        flat = [n for cut in factors for n in cut]
        self.builder.types[name] = TensorType(dtype, tuple(flat), (), ONE)
        dims, axis = list[Group](), 0
        for d, cut in enumerate(factors):
            dims.append(tuple(AxisFactor(n, axis + k, frozenset({Descent(file, d, k)})) for k, n in enumerate(cut)))
            axis += len(cut)
        self.parameters[name] = Stored(file, factors)
        self.inputs[name] = AtomView(name, tuple(dims))
        return self.inputs[name]

    def dtype(self, v: AtomView) -> str:
        """The dtype of a value."""
        return self.builder.types[v.name].dtype

    def mean(self, v: str, *names: str | None) -> str:
        """Say what the dims of a value are."""
        self.meanings.append((v, names))
        return v

    def step(self, op: Op, *names: str) -> AtomView:
        """Write a step on values as they are; all dims of its result are plain."""
        return self.view_value(self.builder(op, *names))

    def view_value(self, name: str) -> AtomView:
        """A value as it is."""
        return AtomView(name, tuple((AxisFactor(n, d),) for d, n in enumerate(self.builder.types[name].shape)))

    # Laying out.

    def materialize_groups(self, v: AtomView, axes: Sequence[Group]) -> str:
        """The name of a value with a dim for each group of atoms, in this order.

        It is written anew each time: what one layer has laid out for itself, the next one must not read.
        """
        name = v.name
        flat = [a for group in axes for a in group]
        if any(not a.size for a in flat):
            raise TypingError(f"a value of the shape {list(v.shape)} has no elements; legal are dims of 1 and more")
        order = [a.axis for a in flat if a.has_axis]
        ndim = self.builder.types[name].ndim
        if len(order) < ndim:  # dims of size 1 that nobody sees
            before = " ".join(f"d{d}" if d in order else f"d{d}=1" for d in range(ndim))
            name = self.builder(Reshape(f"{before} -> {' '.join(f'd{d}' for d in sorted(order))}"), name)
        if order != sorted(order):
            letters = {d: ascii_letters[k] for k, d in enumerate(sorted(order))}
            turned = Einsum(f"{''.join(letters.values())}->{''.join(letters[d] for d in order)}")
            if self.builder.types[name].dtype == "bool":  # of which there are no products
                name = self.builder(Cast("bool"), self.builder(turned, self.builder(Cast("i32"), name)))
            else:
                name = self.builder(turned, name)
        words = [f"d{k}" for k in range(len(flat))]
        if any(not a.has_axis for a in flat):
            new = (w if a.has_axis else f"{w}={a.size}" for w, a in zip(words, flat, strict=True))
            before = (w for w, a in zip(words, flat, strict=True) if a.has_axis)
            name = self.builder(Expand(f"{' '.join(before)} -> {' '.join(new)}"), name)
        if any(len(group) != 1 for group in axes):
            after, k = list[str](), 0
            for j, group in enumerate(axes):
                part = words[k : k + len(group)]
                after.append(f"one{j}=1" if not part else part[0] if len(part) == 1 else f"({' '.join(part)})")
                k += len(group)
            name = self.builder(Reshape(f"{' '.join(words)} -> {' '.join(after)}"), name)
        return name

    def materialize_view(self, v: AtomView) -> AtomView:
        """A value whose dims are those that the source sees."""
        return self.view_value(self.materialize_groups(v, v.dims))

    def merge_dim(self, v: AtomView, dim: int) -> AtomView:
        """A value with one dim of ours for a dim that the source sees."""
        if len(v.dims[dim]) == 1 and v.dims[dim][0].has_axis:
            return v
        axes = [(a,) for d, g in enumerate(v.dims) for a in g if a.has_axis and d != dim]
        at = sum(a.has_axis for g in v.dims[:dim] for a in g)
        name = self.materialize_groups(v, [*axes[:at], v.dims[dim], *axes[at:]])
        places = {a: k + (k >= at) for k, (a,) in enumerate(axes)}
        dims = tuple(
            (AxisFactor(size_of(g), at),)
            if d == dim
            else tuple(a._replace(axis=places[a]) if a.has_axis else a for a in g)
            for d, g in enumerate(v.dims)
        )
        return AtomView(name, dims)

    def cut(self, v: AtomView, dim: int, sizes: Sequence[int]) -> AtomView:
        """Cut the atoms of a dim so that their sizes are these, which refine them; parameters are asked for them."""
        left = list(sizes)
        for k, atom in enumerate(v.dims[dim]):
            part = list[int]()
            while math.prod(part) < atom.size:
                part.append(left.pop(0))
            if len(part) > 1:
                return self.cut(self._cut(v, dim, k, part), dim, sizes)
            if not part and left and left[0] == 1:
                left.pop(0)
        return v

    def _cut(self, v: AtomView, dim: int, k: int, sizes: Sequence[int]) -> AtomView:
        atom = v.dims[dim][k]
        self.request_factors(atom, sizes)
        more = len(sizes) - 1
        if not atom.has_axis:
            new = tuple(AxisFactor(n, BROADCAST) for n in sizes)
            name = v.name
        else:
            new = tuple(AxisFactor(n, atom.axis + j) for j, n in enumerate(sizes))
            ndim, words = self.builder.types[v.name].ndim, [f"e{j}={n}" for j, n in enumerate(sizes)]
            dims = [f"d{d}" for d in range(ndim)]
            sides = (f"({' '.join(words)})", " ".join(f"e{j}" for j in range(len(sizes))))
            before, after = (" ".join([*dims[: atom.axis], side, *dims[atom.axis + 1 :]]) for side in sides)
            name = self.builder(Reshape(f"{before} -> {after}"), v.name)

        def moved(a: AxisFactor) -> AxisFactor:
            return a._replace(axis=a.axis + more) if atom.has_axis and a.axis > atom.axis else a

        dims = tuple(
            tuple(x for j, a in enumerate(g) for x in (new if (d, j) == (dim, k) else (moved(a),)))
            for d, g in enumerate(v.dims)
        )
        return AtomView(name, dims)

    def request_factors(self, atom: AxisFactor, sizes: Sequence[int]) -> None:
        """Ask for the factors of parameters' dims."""
        for o in atom.origins:
            held = next(p.factors[o.dim] for p in self.parameters.values() if p.file == o.file)
            new = sizes if o.parts == 1 else (o.parts, *sizes)
            self.wanted.setdefault((o.file, o.dim), (*held[: o.factor], *new, *held[o.factor + 1 :]))

    def align_cuts(self, views: Sequence[AtomView], places: Sequence[int | None]) -> list[AtomView]:
        """Views of which one dim each, of one size, is cut alike."""
        found = list(views)
        at = [(k, d) for k, d in enumerate(places) if d is not None]
        sizes = refinement([a.size for a in found[k].dims[d]] for k, d in at)
        for k, d in at:
            v = found[k]
            found[k] = self.merge_dim(v, d) if sizes is None else self.cut(v, d, sizes)
        return found

    def reshape_view(self, v: AtomView, shape: Sequence[int]) -> AtomView:
        """The elements in another shape; -1 is what is left."""
        rest = math.prod(n for n in shape if n != -1)
        target = [v.size // rest if n == -1 else n for n in shape]
        flat = AtomView(v.name, (v.atoms,))
        sizes = refinement([[a.size for a in v.atoms], target])
        flat = self.merge_dim(flat, 0) if sizes is None else self.cut(flat, 0, sizes)
        flat = self.cut(flat, 0, refinement([[a.size for a in flat.atoms], target]) or ())
        atoms, dims = [*flat.atoms], list[Group]()
        for n in target:
            group: Group = ()
            if n == 1 and atoms and atoms[0].size == 1:
                group = (atoms.pop(0),)
            while size_of(group) < n:
                group = (*group, atoms.pop(0)) if atoms[0].size > 1 else (atoms.pop(0), group)[1]
            dims.append(group)
        return AtomView(flat.name, tuple(dims))

    # Steps on views.

    def cast(self, v: AtomView, dtype: str) -> AtomView:
        """The values in another dtype; a constant is one again."""
        if self.dtype(v) == dtype:
            return v
        value = self.scalar(v, dtype)
        return AtomView(self.builder(Cast(dtype), v.name), v.dims) if value is None else self.constant(value, dtype)

    def scalar(self, v: AtomView, dtype: str) -> float | None:
        """What a constant without dims is as a number of a dtype; None of another value."""
        if v.dims or v.name not in self.scalars:
            return None
        value, own = self.scalars[v.name], numpy_dtype(self.dtype(v))
        if own.kind in "fV" and itemsize(dtype) > own.itemsize:
            value = float(own.type(value))  # as its dtype has rounded it
        kind = numpy_dtype(dtype).kind
        return bool(value) if kind == "b" else int(value) if kind in "iu" else value

    def constant(self, value: float, dtype: str, shape: Sequence[int] = ()) -> AtomView:
        """One value everywhere."""
        value = finite(value, dtype)
        name = self.builder(Constant(value, dtype, (), Layout(()), ONE))
        self.scalars[name] = value
        return AtomView(name, ()).broadcast_dims(shape) if shape else AtomView(name, ())

    def empty(self, dtype: str, shape: Sequence[int]) -> AtomView:
        """A value without elements: a view that no step may read."""
        return self.constant(0, dtype, shape)

    def count(self, n: int, dtype: str) -> AtomView:
        """Write 0, 1, 2, ..."""
        return self.step(Iota(dtype, (n,), 0, Layout(((),)), ONE))

    def write_elementwise(self, expression: str, *views: AtomView) -> AtomView:
        """An expression of every element, with numpy's broadcasting."""
        ndim = max(len(v.dims) for v in views)
        found = [AtomView(v.name, (*((),) * (ndim - len(v.dims)), *v.tidy.dims)) for v in views]
        for d in range(ndim):
            large = [d if size_of(v.dims[d]) > 1 else None for v in found]
            if sum(x is not None for x in large) > 1:
                found = self.align_cuts(found, large)
        lead = max(found, key=lambda v: math.prod(a.size for a in v.atoms if a.has_axis))
        ways = [found[0].dims[d] for d in range(ndim)]
        for v in found:
            ways = [max(w, g, key=lambda x: (size_of(x), len(x))) for g, w in zip(v.dims, ways, strict=True)]
        # A place of the result is a dim that the source sees and an atom of it.
        holds = [{(d, k): a for d, g in enumerate(v.dims) for k, a in enumerate(g) if a.has_axis} for v in found]
        mine = holds[next(k for k, v in enumerate(found) if v is lead)]
        order = sorted((p for p in mine if mine[p].size > 1 or size_of(ways[p[0]]) == 1), key=lambda p: mine[p].axis)
        every = {p for held in holds for p in held if held[p].size > 1 or size_of(ways[p[0]]) == 1}
        order = sorted(every) if order == sorted(order) else [*sorted(every - {*order}), *order]
        names = list[str]()
        for v, held in zip(found, holds, strict=True):
            axes = [(held[p],) if p in held else () for p in order]
            while axes and not axes[0]:
                axes = axes[1:]
            names.append(self.materialize_groups(v, axes))
        name = self.builder(Elementwise(expression), *names)
        axis = {p: k for k, p in enumerate(order)}
        dims = tuple(
            tuple(
                AxisFactor(a.size, axis.get((d, k), BROADCAST),
                     frozenset(o for h in holds if (d, k) in h for o in h[d, k].origins))
                for k, a in enumerate(g) if a.size > 1 or (d, k) in axis
            )
            for d, g in enumerate(ways)
        )  # fmt: skip
        return AtomView(name, dims)

    def einsum(self, sides: Sequence[Sequence[str]], out: Sequence[str], *views: AtomView) -> AtomView:
        """A product and sums; a side names the dims of a view, and those of one name are one."""
        found = [v.tidy for v in views]
        for label in dict.fromkeys(x for side in sides for x in side):
            at = [s.index(label) if label in s else None for s in sides]
            large = [d if d is not None and size_of(v.dims[d]) > 1 else None for v, d in zip(found, at, strict=True)]
            if sum(x is not None for x in large) > 1:
                found = self.align_cuts(found, large)
            for k, d in enumerate(large):
                v = found[k]
                if d is None or all(a.has_axis for a in v.dims[d]):
                    continue
                others = [j for j, e in enumerate(large) if e is not None and j != k]
                if not any(all(a.has_axis for a in found[j].dims[large[j] or 0]) for j in others):
                    found[k] = self.merge_dim(v, d)
        letters: dict[tuple[str, int], str] = {}
        specs, names = list[str](), list[str]()
        origins: dict[tuple[str, int], AxisFactor] = {}
        for v, side in zip(found, sides, strict=True):
            held = [(a, (label, k)) for label, g in zip(side, v.dims, strict=True) for k, a in enumerate(g)
                    if a.has_axis]  # fmt: skip
            held.sort(key=lambda pair: pair[0].axis)
            names.append(self.materialize_groups(v, [(a,) for a, _ in held]))
            for a, p in held:
                letters.setdefault(p, ascii_letters[len(letters)])
                origins[p] = a._replace(origins=origins.get(p, a).origins | a.origins)
            specs.append("".join(letters[p] for _, p in held))
        kept = [p for label in out for p in sorted(letters) if p[0] == label]
        self._want_parts([*zip(sides, found, strict=True)], out)
        name = self.builder(Einsum(f"{','.join(specs)}->{''.join(letters[p] for p in kept)}"), *names)
        place = {p: k for k, p in enumerate(kept)}
        dims = tuple(tuple(origins[p]._replace(axis=place[p]) for p in kept if p[0] == label) for label in out)
        return AtomView(name, dims)

    def _want_parts(self, sides: Sequence[tuple[Sequence[str], AtomView]], out: Sequence[str]) -> None:
        """Ask for the factors of a weight of which equal parts meet another weight in a sum: gates beside values."""
        atoms = [a for side, v in sides for x, g in zip(side, v.dims, strict=True) if x not in out for a in g]
        plain = {a.size for a in atoms if a.origins and all(o.parts == 1 for o in a.origins)}
        for a in atoms:
            if a.origins and all(o.parts > 1 for o in a.origins) and a.size in plain:
                self.request_factors(a, [a.size])

    def reduce_view(self, v: AtomView, dims: Iterable[int], kind: str, keep: bool) -> AtomView:
        """Reduce some dims."""
        gone = {d % len(v.dims) for d in dims}
        for d in gone:
            v = self.merge_dim(v, d) if not all(a.has_axis for a in v.dims[d]) else v
        axes = tuple(a.axis for d in gone for a in v.dims[d])
        name = self.builder(ReduceDims(axes, kind), v.name) if axes else v.name
        ndim = self.builder.types[v.name].ndim
        left = [k for k in range(ndim) if k not in axes]
        place = {axis: k for k, axis in enumerate(left)}
        groups = tuple(
            () if d in gone else tuple(a._replace(axis=place[a.axis]) if a.has_axis else a for a in g)
            for d, g in enumerate(v.dims) if keep or d not in gone
        )  # fmt: skip
        return AtomView(name, groups)

    def move_dim_last(self, v: AtomView) -> tuple[AtomView, str]:
        """A value whose last dim, as the source sees it, is our last one too, and its name."""
        v = self.merge_dim(v, len(v.dims) - 1)
        (atom,) = v.dims[-1]
        rest = sorted((a for a in v.atoms if a.has_axis and a != atom), key=lambda a: a.axis)
        name = self.materialize_groups(v, [*((a,) for a in rest), (atom,)])
        place = {a: k for k, a in enumerate((*rest, atom))}
        dims = tuple(tuple(a._replace(axis=place[a]) if a.has_axis else a for a in g) for g in v.dims)
        return AtomView(name, dims), name
