"""`rebase_program`: a program on other meshes, as a pipeline stage's is that of another stage on other devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from shardplan.core.mesh import Mesh
from shardplan.core.nested import Nested
from shardplan.core.op import Op
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import TypingError

Meshes = Mapping[Mesh, Mesh]


def rebase_program(program: Program, meshes: Meshes) -> Program:
    """Return a program with some meshes in the place of others of the same axes, others as they are.

    Raises `TypingError` for a table of boxes, whose rows name devices.

    >>> t = TensorType.parse("f32[8@x]", "x=2")
    >>> str(rebase_program(Program({"a": t}, [], ("a",)), {t.mesh: Mesh.parse("x=2 devices=4:6")}).meshes[0])
    'x=2 devices=4:6'
    """
    if program.tables:
        raise TypingError("rebased: a program with tables of boxes, whose rows name devices; legal are layouts")
    inputs = [(name, rebased_type(t, meshes)) for name, t in program.inputs]
    steps = [Step(_op(step.op, meshes), step.operands, step.results, step.stopped) for step in program.steps]
    return Program(inputs, steps, program.outputs)


def rebased_type(t: TensorType, meshes: Meshes) -> TensorType:
    """Return a type on another mesh."""
    return t.with_layout(t.layout, meshes[t.mesh]) if t.mesh in meshes else t


def _op(op: Op, meshes: Meshes) -> Op:
    if isinstance(op, Nested):
        return replace(op, body=rebase_program(op.body, meshes))
    changed = {
        f.name: meshes[value] for f in fields(op) if isinstance(value := getattr(op, f.name), Mesh) and value in meshes
    }
    return replace(op, **changed) if changed else op
