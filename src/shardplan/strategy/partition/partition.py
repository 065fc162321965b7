"""`partition`: from a model and a strategy to a `Job`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardplan.core.dim_names import Names, dim_names
from shardplan.core.layout import Layout
from shardplan.core.nested import row
from shardplan.core.ops import Elementwise
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.movement.redistribute import redistribute
from shardplan.plans.pricing import fabric_of, where_of
from shardplan.strategy.model import Model
from shardplan.strategy.partition.choices import Choice, Layer, served
from shardplan.strategy.partition.flow import Block, Key, Line, Loop, flow, line_of
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.opening import opened
from shardplan.strategy.partition.prices import Prices
from shardplan.strategy.partition.settle import Cut, Problem, Settled, at_most, settle
from shardplan.strategy.partition.tables import Layouts
from shardplan.strategy.partition.write import Movement, Writer
from shardplan.strategy.strategy import Strategy
from shardplan.strategy.training import OPTIMIZERS, Training, renamed, trained

Where = Topology | Placement


def partition(
    model: Model, strategy: Strategy, topo: Where | str | None = None, *, layouts: Layouts | str | None = None
) -> Job:
    """Return the programs of a model under a strategy.

    Args:
        model: A training step, or a forward pass.
        strategy: Degrees, and what else is decided.
        topo: What prices are taken on; device ids are its own. By default a nominal switch.
        layouts: Tables instead of `strategy.layouts(model)`.

    Raises `LayoutError` for a strategy that the model does not admit, naming line and axis.
    """
    return _Partition(model, strategy, topo, layouts).job()


class _Partition:
    def __init__(
        self, model: Model, strategy: Strategy, topo: Where | str | None, layouts: Layouts | str | None
    ) -> None:
        self.strategy = strategy
        self.model = model = _resized(model, strategy)
        self.mesh = strategy.mesh(model)
        self.layouts = Layouts.parse(layouts) if isinstance(layouts, str) else layouts or strategy.layouts(model)
        self.where = where_of("topo", topo)
        fabric = fabric_of(self.where or Topology.load("nominal", devices=strategy.devices), [self.mesh])
        self.prices = Prices(fabric)
        self.training = model.fields["training"]
        self.flow, self.gradient, count = self._flow()
        self.forward = [line for line in self.flow.lines if line.number < count]
        self.backward = [line for line in self.flow.lines if line.number >= count]
        read = {o for line in self.backward for o in line.operands}
        made = (v for line in self.forward for v in line.results)
        self.cut = Cut(count, tuple(v for v in made if v in read))
        self.held = {
            name: self.layouts.held_layout(name, model.dims[name], self.mesh) for name in model.parameters
        }
        self.state = self._state()

    # What is settled

    def _flow(self) -> tuple[Block, dict[str, Key], int]:
        """The lines of one microbatch, where gradients are made, and how many steps are forward."""
        model = self.model
        program = model.forward or model.program
        dims = {name: model.dims[name] for name, _ in program.inputs}
        program, inside = opened(program, dims, self._refused)
        made = Training(program, {}, {}, ())
        if self.training:
            program = _scaled(program, self.strategy.microbatches)
            made = trained(program, model.gradients, keep=_keep(program, self.strategy.recompute, inside))
            names = {g: f"new.{g}" for g in made.gradients.values()}  # `gradient.w` is what they are added to
            found = {w: names[g] for w, g in made.gradients.items()}
            made = made._replace(program=renamed(made.program, names), gradients=found)
        count = len(program.steps)
        names = dim_names(made.program, dims, made.origins)
        return flow(made.program, names), {w: ((), g) for w, g in made.gradients.items()}, count

    def _refused(self, step: Step, program: Program, names: Mapping[str, Names]) -> bool:
        """Say whether an op's own rule refuses what an axis would serve."""
        layer, line = Layer(self.mesh), line_of(0, step, program.step_types(step)[0], names)
        for axis, groups in self.layouts.serve:
            for factors in served(line, groups)[:1]:
                if not any(layer.laid(line, c) for f in factors for c in Choice().serving(axis, f)):
                    return True
        return False

    def _state(self) -> dict[str, TensorType]:
        """The types of inputs and accumulators between programs."""
        out: dict[str, TensorType] = {}
        model = self.model
        for name, t in model.program.inputs:
            of = name if name in model.parameters else name.rpartition(".")[0]
            dims = model.dims[name]
            held = self.held.get(of, Layout(((),) * t.ndim))
            out[name] = self.layouts.stored_type(name, dims, t, self.mesh, held)
        for name in model.gradients if self.training else ():
            t = model.program.types[name]
            kind = self.strategy.gradient_dtype or t.dtype
            t = TensorType(kind, t.shape, (), t.mesh)
            of = f"gradient.{name}"
            out[of] = self.layouts.stored_type(of, model.dims[name], t, self.mesh, self.held[name])
        return out

    def _settled(self) -> tuple[Settled, dict[Key, tuple[str, TensorType]]]:
        """Settle; and the rows that are gradients, each with its parameter and the type of its total."""
        ends: dict[Key, tuple[str, TensorType]] = {}
        for name, (_, value) in self.gradient.items():
            key, t = self._end(value, self.state[f"gradient.{name}"])
            ends[key] = (name, t)
        types = {key: (block.types[key[1]]) for block in self.flow.every() for key in ends if key[0] == block.path}
        wanted = {key: TensorType(types[key].dtype, t.shape, t.layout, t.mesh) for key, (_, t) in ends.items()}
        inputs = {new: old for old, new in self.model.replaced.items()}
        for name in self.flow.outputs:
            t = self.flow.types[name]
            if name in inputs:
                key, last = self._end(name, self.state[inputs[name]])
                wanted[key] = last
            elif not t.shape:
                wanted[(), name] = t.with_layout(Layout(()), self.mesh)
        rows_held = {
            key: Layout(self.held[name].dims[len(self.held[name].dims) - types[key].ndim :]) for key, (name, _) in ends.items()
        }
        problem = Problem(self.flow, self.mesh, self.state, wanted, self.held, rows_held, self.cut)
        serve = dict(self.layouts.serve)
        return settle(problem, serve, self.mesh.axes, self.prices), ends

    def _end(self, value: str, t: TensorType) -> tuple[Key, TensorType]:
        """Where a value that leaves is made, in a body that stacks it, and its type there."""
        line = next((line for line in self.flow.lines if value in line.results), None)
        if isinstance(line, Loop) and (k := line.results.index(value)) >= line.op.kept:
            return (line.block.path, line.block.outputs[k]), row(t)
        return ((), value), t

    # What is written

    def job(self) -> Job:
        """Settle, and write the programs."""
        settled, ends = self._settled()
        for key, (name, t) in ends.items():  # a total is a sum only over what its gradient is one over
            ends[key] = name, at_most(t, settled.type_of(key))
            total = self.state[f"gradient.{name}"]
            layout = ends[key][1].layout
            self.state[f"gradient.{name}"] = total.with_layout(Layout(total.layout.dims, layout.partial, layout.reduction))
        movements: dict[tuple[int, str], tuple[Movement, ...]] = {}
        programs: dict[tuple[int, str], Program] = {}
        made = {r for line in self.forward for r in line.results}
        outputs = [o for o in self.flow.outputs if o in made]
        writer = self._writer(settled, self.forward)
        writer.lines(self.forward, {}, add=False)
        found = [writer.want(o, self._output(writer, o), "output") for o in outputs]
        kept = {v: writer.want(v, settled.saved(((), v)), "the backward pass") for v in self.cut.values}
        called = dict(zip(found, outputs, strict=True))
        called |= {k: f"saved.{v}" for v, k in kept.items() if k not in called}
        programs[0, "F"] = _named(writer.program([*found, *dict.fromkeys(kept.values())]), called)
        movements[0, "F"] = tuple(writer.movements)
        if self.training:
            types = {f"saved.{k}": writer.types[v] for k, v in kept.items()}
            back = self._writer(settled, self.backward)
            for k, name in kept.items():
                back.given(f"saved.{k}", writer.types[name])
                back.values[k] = back.values.pop(f"saved.{k}")
            programs[0, "B"] = self._backward(back, ends)
            movements[0, "B"] = tuple(back.movements)
            programs[0, "OPT"], moved = self._optimizer()
            movements[0, "OPT"] = moved
            self.state |= types
        batch = tuple(n for n, dims in self.model.dims.items() if "batch" in dims and n not in self.model.replaced)
        named = {o: [n for (n,) in self.flow.dims[o]] for o in outputs if all(len(n) == 1 for n in self.flow.dims[o])}
        results = {o: named[o].index("batch") if "batch" in named.get(o, ()) else None for o in outputs
                   if o not in self.model.replaced.values()}  # fmt: skip
        totals = tuple(f"gradient.{w}" for w in self.model.gradients) if self.training else ()
        replaced = tuple(n for n in self.model.replaced if n in self.state)
        return Job(self.model, self.strategy, self.layouts, MappingProxyType(programs), MappingProxyType(self.state),
                   batch, tuple(f"saved.{k}" for k in kept), totals, replaced, results, MappingProxyType(movements),
                   settled)  # fmt: skip

    def _output(self, writer: Writer, name: str) -> TensorType:
        """The type in which a result leaves: what replaces an input lies as that, and nothing is partial."""
        inputs = {new: old for old, new in self.model.replaced.items()}
        if name in inputs:
            return self.state[inputs[name]]
        t = writer.made(name)
        return t.with_layout(Layout(t.layout.dims))

    def _writer(self, settled: Settled, lines: list[Line | Loop]) -> Writer:
        """A writer that has the inputs that lines read."""
        writer = Writer(settled, self.prices, self._plan, [])
        read = {o for line in lines for o in line.operands}
        for name, _ in self.flow.inputs:
            if name in read:
                writer.given(name, self.state[name])
        return writer

    def _plan(self, made: TensorType, wanted: TensorType) -> Any:
        return redistribute(made, wanted, self.where)

    def _backward(self, back: Writer, ends: Mapping[Key, tuple[str, TensorType]]) -> Program:
        """Gradients, added to the totals where there are several microbatches."""
        add = self.strategy.microbatches > 1
        inner = {key: (f"gradient.{name}", t) for key, (name, t) in ends.items() if key[0]}
        entering = back.lines(self.backward, inner, add)
        out: dict[str, str] = {}
        for (path, value), (name, t) in ends.items():
            total = f"gradient.{name}"
            if path:
                stack = self.gradient[name][1]
                out[total] = back.values[stack][back.made(stack)]
                continue
            if add:
                back.given(total, t)
            out[total] = back.accumulated(value, t, total if add else None, f"gradient of {name}")
        assert not add or set(entering) <= set(out)
        program = back.program(list(out.values()))
        return _named(program, {v: f"next.{k}" for k, v in out.items()})

    def _optimizer(self) -> tuple[Program, tuple[Movement, ...]]:
        """Updates where the state is stored; gradients and parameters come there, and parameters go back."""
        model, settled = self.model, None
        rule = OPTIMIZERS[model.fields["optimizer"]]
        op = rule.op(**{k: model.fields.get(k, v) for k, v in rule.settings.items()})
        writer = Writer(settled, self.prices, self._plan, [])  # type: ignore[arg-type]
        out: dict[str, str] = {}
        now: list[str] = []
        if rule.counts:
            writer.given("step", self.state["step"])
            out["step"] = writer.op(Elementwise("a + 1"), ["step"])
            now = [out["step"]]
        for name in model.gradients:
            mine = [f"{name}.{part}" for part in rule.state]
            for n in (name, f"gradient.{name}", *mine):
                writer.given(n, self.state[n])
            t = self.state[mine[0]] if mine else self.state[name]
            given = [self._as(writer, n, t.layout, name) for n in (name, f"gradient.{name}", *mine)]
            first = writer.op(op, [*given, *now])
            results = writer.steps[-1].results
            assert first == results[0]
            for n, value in zip((name, *mine), results, strict=True):
                writer.values[value] = {writer.types[value]: value}
                out[n] = self._as(writer, value, self.state[n].layout, name)
        program = writer.program(list(out.values()))
        return _named(program, {v: f"next.{k}" for k, v in out.items()}), tuple(writer.movements)

    def _as(self, writer: Writer, name: str, layout: Layout, of: str) -> str:
        return writer.want(name, writer.made(name).with_layout(layout), f"the update of {of}")


def _resized(model: Model, strategy: Strategy) -> Model:
    """The model with the batch of one microbatch."""
    batch = strategy.data * strategy.microbatch
    sizes = {n for name, dims in model.dims.items() for d, n in zip(dims, model.program.types[name].shape, strict=True)
             if d == "batch"}  # fmt: skip
    return model if sizes <= {batch} else model.resize(batch=batch)


def _named(program: Program, names: Mapping[str, str]) -> Program:
    """A program in which some values have names, which others that had them give away."""
    moved = {name: f"{name}." for name in names.values() if name in program.types and names.get(name, "") != name}
    return renamed(program, moved | dict(names))


def _scaled(program: Program, count: int) -> Program:
    """A program whose loss is its part of the mean over so many microbatches."""
    if count == 1:
        return program
    inner = renamed(program, {"loss": "loss.whole"})
    step = Step(Elementwise(f"a / {count}"), ("loss.whole",), ("loss",))
    outputs = tuple("loss" if o == "loss.whole" else o for o in inner.outputs)
    return Program(inner.inputs, (*inner.steps, step), outputs)


def _keep(program: Program, recompute: str | tuple[str, ...], opened: set[Step]) -> Any:
    """Which results are kept for the backward pass: of the steps in bodies; of opened ops what was summed, or the most."""
    inside = {step for s in program.steps for step in getattr(getattr(s.op, "body", None), "steps", ())}
    if recompute == "none":
        return lambda step, moved: not moved and (step not in opened or step.op.name == "reduce_dims")
    if recompute == "full":
        return lambda step, moved: step not in inside
    names = ("attention",) if recompute == "selective" else tuple(recompute)
    return lambda step, moved: not moved and not (step in inside and step.op.name in names)

