"""`Program`: inputs, SSA steps and outputs over distributed tensors; verified on construction.

SPMD: one program describes all devices, so its size does not depend on their number. Invariants: value names are
defined once, before use; every step's operand types satisfy its op; the types of all values are derived from the
inputs' types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from shardplan.core import validation
from shardplan.core.box_table import BoxTable
from shardplan.core.mesh import Mesh
from shardplan.core.op import results_of
from shardplan.core.parse import ParsedProgram, parse_text
from shardplan.core.step import Step, last_uses
from shardplan.core.tensor import TensorType
from shardplan.core.text import program_text
from shardplan.errors import ShardplanError, TypingError, excerpt
from shardplan.notebook import notebook_html


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Program:
    """A verified program; `types` maps every value name to its type.

    `inputs` is an ordered mapping (or pairs) of names to types. Raises `TypingError` naming the step that is wrong.

    >>> from shardplan.core.ops import AllGather
    >>> t = TensorType("f32", (8,), ("x",), Mesh(x=2))
    >>> p = Program({"0": t}, [Step(AllGather(0, ("x",)), ("0",), ("1",))], ("1",))
    >>> str(p.types["1"])
    'f32[8]'
    """

    inputs: tuple[tuple[str, TensorType], ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, TensorType] = field(compare=False, hash=False)

    _repr_html_ = notebook_html

    def __init__(
        self,
        inputs: Mapping[str, TensorType] | Iterable[tuple[str, TensorType]],
        steps: Iterable[Step],
        outputs: Iterable[str],
    ) -> None:
        """Verify and derive the types."""
        listed = tuple(inputs.items() if isinstance(inputs, Mapping) else validation.items("inputs", inputs, "pairs"))
        pairs: tuple[tuple[str, TensorType], ...] = listed  # checked below
        body: tuple[Step, ...] = tuple(validation.items("steps", steps, "steps"))
        results = validation.names("outputs", tuple(validation.items("outputs", outputs, "names of values")))
        types: dict[str, TensorType] = {}
        for pair in listed:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
                raise TypingError(f"the input {excerpt(pair)} of a program; legal are pairs (name, type)")
            name, t = pair
            if not isinstance(t, TensorType):
                raise TypingError(f"input %{name} is {excerpt(t)}; legal is a TensorType")
            if name in types:
                raise TypingError(f"input %{name} is defined twice")
            types[name] = t
        for number, step in enumerate(body):
            if not isinstance(step, Step):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypingError(f"step {number} is {excerpt(step)}; legal is a Step")
            for operand in step.operands:
                if operand not in types:
                    raise TypingError(f"{_step_label(number, step)}: %{operand} is not defined before it")
            operands = tuple(types[o] for o in step.operands)
            try:
                found = results_of(step.op, operands)
            except ShardplanError as error:
                raise type(error)(f"{_step_label(number, step)}: {error}") from None
            if len(found) != len(step.results):
                raise TypingError(f"{_step_label(number, step)}: {len(found)} results, but {len(step.results)} names")
            for name, t in zip(step.results, found, strict=True):
                if name in types:
                    raise TypingError(f"{_step_label(number, step)}: %{name} is defined twice")
                types[name] = t
        for name in results:
            if name not in types:
                raise TypingError(f"output %{name} is not defined")
        object.__setattr__(self, "inputs", pairs)
        object.__setattr__(self, "steps", body)
        object.__setattr__(self, "outputs", results)
        object.__setattr__(self, "types", MappingProxyType(types))

    @property
    def input_types(self) -> tuple[TensorType, ...]:
        """The types of the inputs, in order."""
        return tuple(t for _, t in self.inputs)

    @property
    def output_types(self) -> tuple[TensorType, ...]:
        """The types of the outputs, in order."""
        return tuple(self.types[name] for name in self.outputs)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The distinct meshes, in order of appearance; those that only bodies of ops use come last."""
        own = (t.mesh for t in self.types.values())
        return tuple(dict.fromkeys((*own, *(mesh for step in self.steps for mesh in step.op.meshes))))

    @property
    def tables(self) -> tuple[BoxTable, ...]:
        """The distinct tables of boxes, as of `meshes`."""
        own = (t.layout.boxes for t in self.types.values() if t.layout.boxes is not None)
        return tuple(dict.fromkeys((*own, *(table for step in self.steps for table in step.op.tables))))

    @property
    def devices(self) -> tuple[int, ...]:
        """All device ids of all meshes, ascending."""
        return Mesh.devices_of(self.meshes)

    def step_types(self, step: Step) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
        """Return the operand and result types of a step."""
        return tuple(self.types[o] for o in step.operands), tuple(self.types[r] for r in step.results)

    def last_uses(self) -> list[set[str]]:
        """Return, per step, the values that no later step or output reads (operands it frees, results never read)."""
        return last_uses(self.steps, self.outputs)

    def text(self, note: Callable[[int, Step], str] | None = None, total: Callable[[int], str] | None = None) -> str:
        """Return the text that `parse` reads; `note(number, step)` may add a comment to each step's line.

        With `total`, which writes bytes, a text for the eye: lists of many values are folded.
        """
        return program_text(self, note, total)

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return self.text()

    def __repr__(self) -> str:
        """Show the text form."""
        return f"<Program\n{self}>"

    @staticmethod
    def parse(text: str) -> Program:
        """Read a program's text; comments run from '#' to the end of the line.

        Raises:
            ParseError: Text that is no program, at the character; a type that is claimed and not derived.
            TypingError: A step that does not type, and other errors of an op, which name the step.
        """
        return parse_text(text, _check_written)


def _check_written(written: ParsedProgram) -> Program:
    program = Program(written.inputs, written.steps, written.outputs)
    written.check(program.types)
    return program


def _step_label(number: int, step: Step) -> str:
    """Return a step as errors name it."""
    return f"step {number} ({step.op.name})"
