"""A program whose author says how its inputs and results lie, and some values inside: laid out, as a `Job`.

There is no strategy: axes are those of the author's mesh, and each is free but for the annotations. What meets
nowhere is moved, as in any job, which can be run, timed and asked why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from shardplan.core.dim_names import dim_names
from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.ops.compute import computing
from shardplan.core.ops.placing import Pin
from shardplan.core.program import Program
from shardplan.core.shardings import is_sharding, type_of
from shardplan.core.tensor import TensorType, mesh_of
from shardplan.errors import LayoutError, excerpt, line, near_text
from shardplan.hardware.topology import Topology
from shardplan.plans.pricing import Where, where_of
from shardplan.strategy.model import Model
from shardplan.strategy.partition.flow import LineBlock, flow
from shardplan.strategy.partition.job import Job, Programs, StatePart
from shardplan.strategy.partition.order import ordered
from shardplan.strategy.partition.prices import Prices, prices_on
from shardplan.strategy.partition.problem import SettleProblem
from shardplan.strategy.partition.row_plans import RowPlans
from shardplan.strategy.partition.settle import Settled, settle
from shardplan.strategy.partition.tables import Layouts
from shardplan.strategy.partition.write import Movement, Writer
from shardplan.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Annotations:
    """How inputs, results and pinned values of a program lie on a mesh; inputs without one are whole."""

    mesh: Mesh
    types: Mapping[str, TensorType]

    def with_annotations(self, more: Mapping[str, TensorType]) -> Annotations:
        """Return them with others in the place of some."""
        return replace(self, types=MappingProxyType({**self.types, **more}))


def read_annotations(model: Model, said: Mapping[str, Any] | None = None, mesh: object = None) -> Annotations:
    """Return what a model's source says, and what is said beside it, which wins.

    Args:
        model: Of a source that does not train here; its gradients may be in it.
        said: By name of an input, a result or a pinned value a type, its text (`f32[16@x, 16]`), or a JAX sharding.
        mesh: A mesh or its text; by default that of the types.

    Raises `LayoutError` for a name that there is not, a type of another shape, and where no mesh is said.
    """
    if model.fields["training"]:
        raise LayoutError("annotations of a model that trains; legal is a forward program, or one with gradients in it")
    shapes = {name: model.program.types[name] for name in (*dict(model.program.inputs), *model.program.outputs)}
    pins = dict(_pins(model.program))
    shapes |= {name: model.program.types[name] for name in pins}
    found = dict(model.annotations)
    laid = None if mesh is None else mesh_of("annotations: mesh", mesh)
    for name, value in (said or {}).items():
        if name not in shapes:
            raise LayoutError(
                f"annotations: there is no {excerpt(name)}{near_text(name, shapes)}; legal are {', '.join(shapes)}"
            )
        t = shapes[name]
        if is_sharding(value):
            found[name] = type_of(t.shape, value, t.dtype)
            continue
        laid = laid or next((t.mesh for t in found.values()), None)
        if isinstance(value, str):
            if laid is None:
                raise LayoutError(f"annotations: {name} is {excerpt(value)}, of no mesh; legal is mesh='x=4,y=2'")
            value = TensorType.parse(value, laid)
        if not isinstance(value, TensorType) or (value.dtype, value.shape) != (t.dtype, t.shape):
            raise LayoutError(f"annotations: {name} is {line(value)}; legal is a layout of {t}")
        found[name] = value
    meshes = {t.mesh for t in found.values()} | ({laid} if laid else set[Mesh]())
    if len(meshes) != 1:
        several = f"{len(meshes)} meshes, {'; '.join(map(str, meshes))}" if meshes else "no mesh"
        raise LayoutError(f"annotations of {several}; legal is one, as mesh='x=4,y=2' or of the types")
    (one,) = meshes
    for name, layout in pins.items():
        strange = [a for dim in layout.dims for a in dim if a not in one.axes]
        if strange:
            raise LayoutError(f"%{name} is pinned to the axis {excerpt(strange[0])}; legal are {', '.join(one.axes)}")
    return Annotations(one, MappingProxyType(found))


def partition_annotated(model: Model, annotations: Annotations, topo: Where | str | None = None) -> Job:
    """Return a model's program as annotations lay it out, for one step: the forward pass of a job of one stage.

    Raises `LayoutError` where an op can lie in no way as is said.
    """
    where = where_of("topo", topo)
    settled, block = settle_annotated(model, annotations, annotated_prices(annotations, where))
    movements: list[Movement] = []
    writer = Writer(settled, settled.prices, RowPlans(where, frozenset()), movements)
    for name, _ in block.inputs:
        writer.given(name, given_type(model, annotations, name))
    writer.lines(block.lines, {}, add=False)
    outputs = []
    for name in block.outputs:
        made = writer.made(name)
        wanted = annotations.types.get(name, made.with_layout(Layout(made.layout.dims)))
        outputs.append(writer.want(name, wanted, f"the result {name}"))
    program = writer.program(outputs)
    mesh, strategy = annotations.mesh, Strategy(data=annotations.mesh.size)
    state = dict(program.inputs)
    parts = {name: StatePart(0, name, None) for name in state}
    # All inputs are a batch's: none is a parameter that lives between steps, and is gathered beside them.
    return Job(
        model, strategy, Layouts(()), ordered(strategy, model), Programs((program,), {(0, "F"): 0}, (mesh,)),
        MappingProxyType(state), MappingProxyType(parts), (), tuple(state), MappingProxyType(dict.fromkeys(outputs)),
        MappingProxyType({(0, "F"): tuple(movements)}), settled,
    )  # fmt: skip


def annotated_prices(annotations: Annotations, where: Where | None) -> Prices:
    """Return what is paid: on a topology or a placement, by default on a nominal switch."""
    most = max(annotations.mesh.devices) + 1
    return prices_on(where or Topology.load("nominal", devices=most), (annotations.mesh,))


def settle_annotated(model: Model, annotations: Annotations, prices: Prices) -> tuple[Settled, LineBlock]:
    """Return the options of all ops that take the least seconds, and the program as lines."""
    program = _pinned_program(model.program, annotations)
    block = flow(program, dim_names(program, {name: model.dims[name] for name, _ in program.inputs}))
    given = {name: given_type(model, annotations, name) for name, _ in program.inputs}
    wanted = {((), name): t for name, t in annotations.types.items() if name in program.outputs}
    problem = SettleProblem(block, annotations.mesh, given, wanted, {}, {})
    return settle(problem, {}, annotations.mesh.axes, prices), block


def given_type(model: Model, annotations: Annotations, name: str) -> TensorType:
    """Return how an input lies."""
    t = model.program.types[name]
    return annotations.types.get(name) or t.with_layout(Layout(((),) * t.ndim), annotations.mesh)


def _pins(program: Program) -> Iterator[tuple[str, Layout]]:
    """The values that a program pins, but for those inside bodies, and how."""
    for step in program.steps:
        op = computing(step.op)
        if op is not None and op.pinned_layout is not None:
            yield step.results[0], op.pinned_layout


def _pinned_program(program: Program, annotations: Annotations) -> Program:
    """A program in which values that it pins are pinned as annotations say."""
    pins = {name for name, _ in _pins(program)}
    steps = list(program.steps)
    for k, step in enumerate(steps):
        said = annotations.types.get(step.results[0])
        if step.results[0] in pins and said is not None:
            steps[k] = replace(step, op=Pin(Layout(said.layout.dims)))
    return Program(program.inputs, steps, program.outputs)
