"""What a settlement chooses: its choices, and who makes and wants every value of a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardplan.core.dim_names import Names
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.nested import row_type, stacked_type
from shardplan.core.tensor import TensorType
from shardplan.strategy.partition.choices import Bounds, Choice, HeldDims, Layer, TypedLine
from shardplan.strategy.partition.flow import Key, Line, LineBlock, Loop, Path

Types = tuple[TensorType, ...]  # by option of a choice


class ValueSource(NamedTuple):
    """Who makes a value: a choice and the number of its result, or None and the type of an input.

    The value is a row of it, `cut` times over, and then a stack of `counts` of those, the outermost first.
    """

    maker: Maker | None
    result: int
    cut: int = 0
    counts: tuple[int, ...] = ()
    fixed: TensorType | None = None
    name: str = ""  # of the input
    again: bool = False  # read by the backward pass, which has no copy of what the forward pass moved

    def seen(self, t: TensorType) -> TensorType:
        """Return the type of the value, given that of what was made."""
        for _ in range(self.cut):
            t = row_type(t)
        for count in reversed(self.counts):
            t = stacked_type(t, count)
        return t

    def row(self) -> ValueSource:
        """Return where a row of the value comes from."""
        return self._replace(counts=self.counts[1:]) if self.counts else self._replace(cut=self.cut + 1)

    def stack(self, count: int) -> ValueSource:
        """Return where a stack of so many of the value comes from."""
        return self._replace(counts=(count, *self.counts))

    def types(self, found: Mapping[Maker, Sequence[Option]], axes: set[str]) -> Types:
        """Return the types of the value by option of its maker; of an input its only one, of which `axes` count."""
        if self.maker is not None:
            return tuple(self.seen(o.made[self.result]) for o in found[self.maker])
        assert self.fixed is not None  # of an input
        return (self.seen(onto(self.fixed, axes)),)


@dataclass(frozen=True, slots=True, eq=False)
class Maker:
    """What chooses: a line; or the type of a value that a loop carries, or that is saved for the backward pass.

    Of such a value `kept` is its type on one device and `dims` the names of its dims; the type is partial only where it
    is one of the `sums`, which a loop begins with nothing: operand 0 is what a run leaves, 1 what the first is given.
    """

    path: Path
    times: int
    line: Line | None
    bounds: Bounds
    kept: TensorType | None = None
    dims: tuple[Names, ...] = ()
    sums: bool = False


class Use(NamedTuple):
    """Who wants a value: operand `operand` of a choice, in a block that runs `times` times."""

    maker: Maker
    operand: int
    path: Path
    times: int
    source: ValueSource


class End(NamedTuple):
    """A type that a value must come to in a block that runs `times` times; a sum where it is made as one."""

    source: ValueSource
    times: int
    t: TensorType


def pinned(line: Line, mesh: Mesh) -> HeldDims | None:
    """How the model says that the operand and the result of a line lie, over the axes that a mesh has."""
    said = line.op.pinned_layout
    return None if said is None else HeldDims(tuple(tuple(a for a in d if a in mesh.axes) for d in said.dims))


def at_most(t: TensorType, made: TensorType) -> TensorType:
    """Return a type that is partial only over axes that `made` is partial over."""
    both = set(t.mesh.expand(t.layout.partial)) & set(t.mesh.expand(made.layout.partial))
    partial = t.mesh.fold(tuple(sorted(both)))
    return t.with_layout(Layout(t.layout.dims, partial, t.layout.reduction if partial else None))


def onto(t: TensorType, axes: set[str]) -> TensorType:
    """A type as it is over some axes, whole over all others."""
    if set(t.layout.used_axes) <= axes:
        return t
    partial = tuple(a for a in t.layout.partial if a in axes)
    dims = tuple(tuple(a for a in dim if a in axes) for dim in t.layout.dims)
    return t.with_layout(Layout(dims, partial, t.layout.reduction if partial else None))


@dataclass(frozen=True, slots=True)
class Option:
    """What a choice may be: of a line its `choice`; the types wanted and made; the seconds of the op, once."""

    wanted: tuple[TensorType, ...]
    made: tuple[TensorType, ...]
    seconds: float
    choice: Choice = field(default_factory=Choice)
    laid: TypedLine | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """From which line on the backward pass is, and the values that it reads of those before.

    `twins` has of each body of the backward pass the body that it is the gradient of. What is `kept`, by the names of
    inputs and of dims, the backward pass reads as the forward pass moved it.
    """

    number: int
    values: tuple[str, ...]
    twins: Mapping[Path, Path] = field(default_factory=dict[Path, Path])
    kept_inputs: frozenset[str] = frozenset()
    kept_dims: frozenset[str] = frozenset()

    def keeps(self, block: LineBlock, name: str) -> bool:
        """Say whether copies of a value that the forward pass makes are kept."""
        return not self.kept_dims.isdisjoint(dim for names in block.dims[name] for dim in names)


def carries_sum(loop: Loop, number: int) -> bool:
    """Say whether a loop of the backward pass carries a value only to add to it, as the gradient of an invariant."""
    name, leaves = loop.block.inputs[number][0], loop.block.outputs[number]
    reads = [line for line in loop.block.lines if name in line.operands]
    return len(reads) == 1 and reads[0].results == (leaves,) and isinstance(reads[0], Line) and _adds(reads[0])


def _adds(line: Line) -> bool:
    """Whether the result is a sum where all operands are, and nothing else: an addition."""
    return line.op.passes(frozenset(range(len(line.types))), "sum", line.types) and len(line.types) == 2


class SettleProblem:
    """The choices of a program, and who makes and wants its values.

    Args:
        root: The program.
        mesh: The mesh of a stage.
        given: The types of its inputs.
        wanted: Types that values must come to, at the end of their block.
        held: Of parameters how they are held where they are operands.
        gradients: Of values that are gradients how their parameters are held.
        cut: What is saved for the backward pass.
    """

    def __init__(
        self,
        root: LineBlock,
        mesh: Mesh,
        given: Mapping[str, TensorType],
        wanted: Mapping[Key, TensorType],
        held: Mapping[str, Layout],
        gradients: Mapping[Key, Layout],
        cut: Cut | None = None,
    ) -> None:
        self.mesh, self.layer = mesh, Layer(mesh)
        self.makers: list[Maker] = []
        self.lines: dict[Line, Maker] = {}
        self.carries: dict[tuple[Path, int], Maker] = {}
        self.saves: dict[Key, Maker] = {}
        self.sources: dict[Key, ValueSource] = {}
        self.uses: list[Use] = []
        self.ends: list[End] = []
        self.held: dict[Key, HeldDims] = {}
        self.gradients = {key: HeldDims(layout.dims) for key, layout in gradients.items()}
        for name, _ in root.inputs:
            self.sources[(), name] = ValueSource(None, 0, fixed=given[name], name=name)
            if name in held:
                self.held[(), name] = HeldDims(held[name].dims)
        self.wanted = wanted
        self.cut = cut or Cut(len(root.lines), ())
        self.late: Sequence[Use] = ()  # uses by the backward pass of what the forward pass is given, or makes
        self._block(root, cut)
        for key, t in wanted.items():
            times = next(b.times for b in root.every() if b.path == key[0])
            self.ends.append(End(self.sources[key], times, t))

    def _saved(self, block: LineBlock, name: str) -> ValueSource:
        """What is saved of a value: in the type in which it was made, or in another of no more bytes."""
        key = block.path, name
        if key not in self.saves:
            self.saves[key] = self._keeps(block, name)
            self.uses.append(Use(self.saves[key], 0, block.path, block.times, self.sources[key]))
        return ValueSource(self.saves[key], 0)

    def _keeps(self, block: LineBlock, name: str, sums: bool = False) -> Maker:
        none = Bounds({}, {})
        maker = Maker(block.path, block.times, None, none, block.types[name], block.dims[name], sums)
        self.makers.append(maker)
        return maker

    def _block(self, block: LineBlock, cut: Cut | None = None) -> None:
        for line in block.lines:
            if cut is not None and line.number >= cut.number:
                early = {*self.makers, None}
                for name in cut.values:
                    if not cut.keeps(block, name):
                        self.sources[block.path, name] = self._saved(block, name)
                for name in dict(block.inputs).keys() - cut.kept_inputs:
                    self.sources[block.path, name] = self.sources[block.path, name]._replace(again=True)
                made = len(self.uses)
                self._block(replace(block, lines=block.lines[block.lines.index(line) :]))
                late = [use for use in self.uses[made:] if use.source.maker in early and not use.source.again]
                self.late = [use for use in late if use.source.maker not in self.saves.values()]
                return
            if isinstance(line, Loop):
                self._loop(block, line)
                continue
            keys = [(block.path, o) for o in line.operands]
            pin = pinned(line, self.mesh)
            bounds = (
                Bounds({0: pin}, {0: pin}, pinned=True)
                if pin is not None
                else Bounds(
                    {k: self.held[key] for k, key in enumerate(keys) if key in self.held},
                    {
                        k: self.gradients[block.path, r]
                        for k, r in enumerate(line.results)
                        if (block.path, r) in self.gradients
                    },
                )
            )
            maker = self.lines[line] = Maker(block.path, block.times, line, bounds)
            self.makers.append(maker)
            for k, key in enumerate(keys):
                self.uses.append(Use(maker, k, block.path, block.times, self.sources[key]))
            for k, name in enumerate(line.results):
                self.sources[block.path, name] = ValueSource(maker, k)

    def _loop(self, block: LineBlock, loop: Loop) -> None:
        inner, op = loop.block, loop.op
        names = [name for name, _ in inner.inputs]
        whole = len(names) - op.cut
        carries: list[Maker] = []
        for k, (outside, (name, _)) in enumerate(zip(loop.operands, inner.inputs, strict=True)):
            if k < op.carried_count:
                maker = self.carries[inner.path, k] = self._keeps(inner, name, carries_sum(loop, k))
                carries.append(maker)
                self.uses.append(Use(maker, maker.sums, block.path, block.times, self.sources[block.path, outside]))
                self.sources[inner.path, name] = ValueSource(maker, 0)
                continue
            source = self.sources[block.path, outside]
            held = self.held.get((block.path, outside))
            if held:
                self.held[inner.path, name] = HeldDims(held.dims[k >= whole :])
            self.sources[inner.path, name] = source.row() if k >= whole else source
        self._block(inner)
        for k, (outside, name) in enumerate(zip(loop.results, inner.outputs, strict=True)):
            source = self.sources[inner.path, name]
            if k < op.carried_count:
                self.uses.append(Use(carries[k], 0, inner.path, inner.times, source))
                self.sources[block.path, outside] = ValueSource(carries[k], 0)
            else:
                kept = loop.number < self.cut.number and self.cut.keeps(inner, name)
                if (inner.path, name) not in self.wanted and not kept:
                    source = self._saved(inner, name)
                self.sources[block.path, outside] = source.stack(op.times)
