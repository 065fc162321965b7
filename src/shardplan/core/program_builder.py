"""`ProgramBuilder`: steps while they are written, each typed as it comes; and `Decomposition`, an op as such steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from shardplan.core.op import Op, results_of
from shardplan.core.ops.reduction import AllReduce
from shardplan.core.step import Step, live_steps
from shardplan.core.tensor import TensorType

Values = Sequence[str]  # of a builder, by name
Cotangents = Sequence[str | None]  # None of a value that has none


class Decomposition(NamedTuple):
    """An op as steps of other ops, on values called "0", "1", ... as the operands are numbered.

    Of some values `alike` has another one whose cotangent or copy it is: their dims are the same.
    """

    steps: tuple[Step, ...]
    results: tuple[str, ...]
    alike: Mapping[str, str]


class ProgramBuilder:
    """Steps being written on values whose types are known; a step's results get names that are free.

    >>> from shardplan.core.ops import Einsum, Elementwise
    >>> t = TensorType.parse("f32[8@x, 4]", "x=2")
    >>> d = ProgramBuilder({"a": t})
    >>> b = d(Elementwise("exp(a)"), "a")
    >>> print(d.types[d(Einsum("ij->j"), b)], len(d.steps))
    f32[4]{+x} 2
    """

    def __init__(self, types: Mapping[str, TensorType]) -> None:
        """Begin with values from outside."""
        self.types = dict(types)
        self.steps: list[Step] = []
        self.origins: list[int | None] = []  # beside each step what `origin` was when it was written
        self.origin: int | None = None
        self.alike: dict[
            str, str
        ] = {}  # see `Decomposition`; where forward values are in another builder, they are too

    @classmethod
    def of(cls, operands: Iterable[TensorType]) -> Self:
        """Begin with operands called "0", "1", ..."""
        return cls({str(k): t for k, t in enumerate(operands)})

    def write_step(self, op: Op, *operands: str, stopped: tuple[int, ...] = ()) -> tuple[str, ...]:
        """Write a step, and return the names of its results; raises what the op says of the types."""
        found = results_of(op, tuple(self.types[o] for o in operands))
        names: list[str] = []
        for t in found:
            names.append(self.new_name())
            self.types[names[-1]] = t
        self.steps.append(Step(op, operands, tuple(names), stopped))
        self.origins.append(self.origin)
        return tuple(names)

    def __call__(self, op: Op, *operands: str, stopped: tuple[int, ...] = ()) -> str:
        """Write a step of one result."""
        (name,) = self.write_step(op, *operands, stopped=stopped)
        return name

    def new_name(self) -> str:
        """Return a name that no value has."""
        k = len(self.types)
        while str(k) in self.types:
            k += 1
        return str(k)

    def add_input(self, t: TensorType) -> str:
        """Return the name of one more value from outside."""
        name = self.new_name()
        self.types[name] = t
        return name

    def decomposition(self, *results: str) -> Decomposition:
        """Return the steps that the results need."""
        return Decomposition(tuple(self.steps[k] for k in self.live(results)), results, self.alike)

    def live(self, results: Iterable[str]) -> list[int]:
        """Return the numbers of the steps that some results need."""
        return live_steps(self.steps, results)

    def copy(self, steps: Iterable[Step], value: Callable[[str], str]) -> dict[str, str]:
        """Write steps again, and return what their values are called; those from outside are `value(name)`."""
        names: dict[str, str] = {}
        for step in steps:
            operands = (names[o] if o in names else value(o) for o in step.operands)
            names.update(zip(step.results, self.write_step(step.op, *operands, stopped=step.stopped), strict=True))
        return names

    def reduce_axes(self, name: str, axes: Iterable[str]) -> str:
        """Return a value that is not partial over `axes`."""
        t = self.types[name]
        atoms, chosen = t.mesh.expand(t.layout.partial), set(t.mesh.expand(axes))
        over = t.mesh.fold(tuple(a for a in atoms if a in chosen))
        return self(AllReduce(over, t.layout.reduction or "sum"), name) if over else name
