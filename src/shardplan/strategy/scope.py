"""`Scope`: a model's program while it is written: inputs with names for their dims, parameters, and steps.

Layers are the body of a `repeat`, written once in a scope of their own; their parameters are inputs of the whole, one
row a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.op import Op
from shardplan.core.ops import Cast, Einsum, Elementwise, Iota, ReduceDims, Repeat, TargetCount
from shardplan.core.ops.placing import widened
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.tensor import TensorType
from shardplan.strategy.parameter import FactorPart, Parameter

Sizes = Mapping[str, int]  # the dims of a value, in order
ONE = Mesh()


class Scope:
    """A model's program, or the body of its layers; `dtype` is that of parameters and of what is computed.

    `replaced` says of an input which value takes its place in the next run, `results` what else leaves, `carried` what
    a layer hands on to the next one beside its result.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.place = 0  # of the layer that is written, where a body has several
        self.prefix = ""  # of the names of what it has
        self.builder = ProgramBuilder({})
        self.inputs: dict[str, Sizes] = {}
        self.parameters: dict[str, Parameter] = {}
        self.replaced: dict[str, str] = {}
        self.results: dict[str, str] = {}
        self.carried: dict[str, str] = {}

    def __call__(self, op: Op, *operands: str) -> str:
        """Write a step of one result."""
        return self.builder(op, *operands)

    def elementwise(self, expression: str, *operands: str) -> str:
        """Write an expression of every element."""
        return self.builder(Elementwise(expression), *operands)

    def einsum(self, spec: str, *operands: str) -> str:
        """Write a product."""
        return self.builder(Einsum(spec), *operands)

    def count(self, n: int) -> str:
        """Write 0, 1, 2, ..., i32."""
        return self.builder(Iota("i32", (n,), 0, Layout(((),)), ONE))

    def mean(self, losses: str) -> str:
        """Write the mean over all dims, in f32 or wider, as the result `loss`."""
        losses = widened(self.builder, losses)
        self.results["loss"] = self.builder(ReduceDims(tuple(range(self.builder.types[losses].ndim)), "mean"), losses)
        return self.results["loss"]

    def sum_all(self, value: str) -> str:
        """Write the sum over all dims, in f32 or wider."""
        value = widened(self.builder, value)
        return self.builder(ReduceDims(tuple(range(self.builder.types[value].ndim))), value)

    def counted_mean(self, losses: str, targets: str, each: str | None = None, beside: str | None = None) -> str:
        """Write the mean over those whose target counts, in f32 or wider, as the result `loss`; 0 where none does.

        To a mean `each` is added, which is weighed by how many of these targets count, as if it were every one's; and
        the sum `beside`, divided as theirs is.
        """
        total = self.sum_all(losses)
        t = self.builder.types[total]
        if each is not None:
            mine = self.sum_all(self.builder(Cast(t.dtype), self.elementwise("where(a == -100, 0, 1)", targets)))
            total = self.elementwise("a + b * c", total, each, mine)
        if beside is not None:
            total = self.elementwise("a + b", total, beside)
        self.results["loss"] = self.elementwise("a / maximum(b, 1)", total, self.builder(TargetCount(t.dtype), targets))
        return self.results["loss"]

    def input(self, name: str, dims: Sizes, dtype: str = "") -> str:
        """Declare an input, and return its name."""
        name = f"{self.prefix}{name}"
        assert name not in self.inputs, name
        self.inputs[name] = dims
        self.builder.types[name] = TensorType(dtype or self.dtype, tuple(dims.values()), (), ONE)
        return name

    def parameter(
        self, name: str, dims: Sizes, file: str, stored: str = "", part: FactorPart | None = None, trained: bool = True
    ) -> str:
        """Declare a parameter, and where a checkpoint has it; by default with the same dims."""
        name = self.input(name, dims)
        self.parameters[name] = Parameter(
            (*dims.items(),), file, stored or " ".join(dims), part, self.place, trained=trained
        )
        return name

    def add_result(self, name: str, value: str) -> None:
        """Say that a value leaves."""
        self.results[f"{self.prefix}{name}"] = value

    def layers(
        self,
        name: str,
        numbers: range,
        x: str,
        body: Callable[[Scope, str, Mapping[str, str]], str],
        invariants: Mapping[str, str],
        period: int = 1,
    ) -> str:
        """Write layers that carry `x` on, and return the last one's; `name` opens the names of their inputs.

        `body` writes one, given its scope, the names there of `x` and of the invariants, and its place in the period:
        of so many layers, which divide them, each has parameters of its own, named `name.place.`.
        """
        inner, count = Scope(self.dtype), len(numbers) // period
        types = inner.builder.types
        types["x"] = self.builder.types[x]
        types |= {inside: self.builder.types[outside] for inside, outside in self.carried.items()}
        inner.carried = {inside: inside for inside in self.carried}
        types |= {inside: self.builder.types[outside] for inside, outside in invariants.items()}
        y, given = "x", {inside: inside for inside in invariants}
        for inner.place in range(period):
            inner.prefix = f"{inner.place}." if period > 1 else ""
            y = body(inner, y, given)
        inputs = ["x", *self.carried, *invariants, *inner.inputs]
        rows = {f"{name}.{key}": value for key, value in inner.replaced.items()}
        rows |= {f"{name}.{key}": value for key, value in inner.results.items()}
        program = Program(
            [(n, types[n]) for n in inputs], inner.builder.steps, (y, *inner.carried.values(), *rows.values())
        )
        for key, dims in inner.inputs.items():
            outer = {"layer": count, **dims}
            self.input(f"{name}.{key}", outer, types[key].dtype)
            if key in inner.parameters:
                found = inner.parameters[key]
                first = numbers.start + found.first
                made = replace(found, dims=(*outer.items(),), first=first, stride=period)
                self.parameters[f"{name}.{key}"] = made
        stacked = [f"{name}.{key}" for key in inner.inputs]
        hands = 1 + len(self.carried)
        out = self.builder.write_step(
            Repeat(count, program, carried=hands, sliced=len(stacked)),
            *(x, *self.carried.values(), *invariants.values(), *stacked),
        )
        self.carried = dict(zip(self.carried, out[1:hands], strict=True))
        made = dict(zip(rows, out[hands:], strict=True))
        self.replaced |= {key: value for key, value in made.items() if key in self.inputs}
        self.results |= {key: value for key, value in made.items() if key not in self.inputs}
        return out[0]

    def program(self, outputs: Sequence[str]) -> Program:
        """Return what was written."""
        return Program([(name, self.builder.types[name]) for name in self.inputs], self.builder.steps, outputs)
