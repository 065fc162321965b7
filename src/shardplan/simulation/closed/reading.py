"""`read`: from a model and a strategy's tables to what every device does: kernels and movements of any sizes.

The one-device program is read once for every kind of strategy (which axes it has, what they serve). `propagate_axes`
says which factor of a step each axis carries; where a value is wanted otherwise than it is made, there is a movement.
That is what `partition` settles by price, here without a price: `tests/simulation/test_reading.py` holds one against
the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from shardplan.core.dim_names import DimNames, Links, dim_names
from shardplan.core.mesh import Mesh
from shardplan.core.nested import Nested, as_nested
from shardplan.core.ops.compute import Compute, computing
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.simulation.closed.addends import addends, no_larger
from shardplan.simulation.closed.caches import kept_values, moments_of
from shardplan.simulation.closed.factored_sums import factored_sums
from shardplan.simulation.closed.kernel_classes import cast_operands
from shardplan.simulation.closed.lifetimes import layer_life
from shardplan.simulation.closed.outside_layers import is_read_early, outside_layers, run_of
from shardplan.simulation.closed.read_block import (
    ReadBlock,
    canonical_state,
    joins_product,
    made_of,
    move_steps,
    needed_inside,
    needed_values,
    table_state,
)
from shardplan.simulation.closed.work import (
    BACKWARD,
    FORWARD,
    Extent,
    HeldParameter,
    LayerLife,
    LocalKernel,
    LocalMove,
    LocalValue,
    Saved,
    StepProfile,
    of_factors,
    with_slots,
    work_of,
)
from shardplan.strategy.held_cuts import expert_dim
from shardplan.strategy.model import Model
from shardplan.strategy.partition.axis_propagation import PARTIAL, OperandState, State, propagate_axes
from shardplan.strategy.partition.decomposition import refuses
from shardplan.strategy.partition.flow import line_of
from shardplan.strategy.partition.tables import FREE, LAYER, Layouts


def read(model: Model, layouts: Layouts, axes: Sequence[str], names: DimNames | None = None) -> StepProfile:
    """Return what a model's step is on a mesh of these axes, under these tables; the sizes of axes do not matter.

    `names` are those of the model's dims, where known.
    """
    found = _Reader(model, layouts, tuple(axes), names).read()
    kept, sums = kept_values(model, layouts, axes), factored_sums(model, found.parameters)
    return replace(found, kept=kept, moments=moments_of(model), factored=sums)


class _Reader:
    """Reads a model."""

    def __init__(self, model: Model, layouts: Layouts, axes: tuple[str, ...], names: DimNames | None = None) -> None:
        self.model, self.axes = model, axes
        serve = dict(layouts.serve)
        self.serve = {a: [g for g in serve.get(a, ()) if FREE not in g] for a in axes}
        self.layouts, self.mesh = layouts, Mesh(dict.fromkeys(axes, 2))
        self.names = names or dim_names(model.program, model.dims, model.origins)
        self.kernels: list[LocalKernel] = []
        self.moves: list[LocalMove] = []
        self.saved: dict[tuple[int, str], Saved] = {}
        self.layers: list[int] = []
        self.forwards = sum(o is None for o in model.origins) if model.origins else len(model.program.steps)
        self.phase = FORWARD
        self.batch = max((n for name in model.dims for d, n in self._sizes(name) if d == "batch"), default=1)
        self.owners = {value: name for name, value in model.gradients.items()}
        self.alike: dict[str, tuple[int, str]] = {}  # by a stack of saved values, the run and the value in its body
        self.carried = LocalValue(0, ())
        self.lives: list[LayerLife] = []
        self.opened: set[tuple[int, str]] = set()  # by run what is made of ops that are written out, and not saved
        self.products: dict[int, int] = {}  # by run how many there were
        self.second: dict[tuple[int, str], LocalValue] = {}  # of every second one what it makes, where that is needed
        self.entering: dict[int, str] = {}  # by run the value of its body that layers hand on

    def _sizes(self, name: str) -> Iterator[tuple[str, int]]:
        shape = self.model.program.types[name].shape if name in self.model.program.types else ()
        return zip(self.model.dims[name], shape, strict=bool(shape))

    def read(self) -> StepProfile:
        """Read."""
        program = self.model.program
        top = ReadBlock(program, self.names, -1)
        for name, _ in program.inputs:
            dims = self.model.dims.get(name, ())
            if name in self.model.parameters:
                held = table_state(self.layouts.held, name, dims, self.axes)
                top.held[name] = name, held
                top.state[name] = held
            else:
                top.state[name] = table_state(self.layouts.stored, name, dims, self.axes)
            top.made[name] = [top.state[name]]
        top.held |= {value: top.held[name] for value, name in self.owners.items()}
        top.needed = needed_values(program, self.forwards)
        top.kept = {o for step in program.steps[self.forwards :] for o in step.operands}
        top.parts = addends(self.model, self.forwards, {value: top.held[value][1] for value in self.owners})
        for number, step in enumerate(program.steps):
            if self.model.origins and number >= len(self.model.origins):
                break  # the optimizer's
            self.phase = FORWARD if number < self.forwards else BACKWARD
            if self.phase == FORWARD and self.layers:
                top.run = -2
            if number == self.forwards:
                top.made = {name: [states[0], *no_larger(states)] for name, states in top.made.items()}
            self._step(top, number, step)
        outside = outside_layers(program, self.forwards, len(self.model.origins))
        parameters = tuple(self._parameter(top, name) for name in self.model.parameters)
        return StepProfile(
            tuple(self.kernels),
            tuple(self.moves),
            tuple(self.saved.values()),
            parameters,
            tuple(self.layers),
            self.batch,
            self.carried,
            lives=tuple(self.lives),
            second=tuple((run, value) for (run, _), value in self.second.items()),
            outside=tuple(
                Saved(run, self._local(top, v, program.types[v], canonical_state(top, v, self.serve)), "", "")
                for v, run in outside.saved.items()
            ),
            copies=tuple(h._replace(run=-2) for h in parameters if h.run == -1 and h.name in outside.late),
            tables=tuple(h for h in parameters if h.run < 0 and h.name in outside.tables),
        )

    def _parameter(self, top: ReadBlock, name: str) -> HeldParameter:
        t, dims = self.model.program.types[name], self.model.dims[name]
        held = top.held[name][1]
        run, first = -1, 0
        gradient = self.model.gradients.get(name)
        state = top.state.get(gradient, {}) if gradient else {}
        sums = tuple(a for a in self.axes if state.get(a) == PARTIAL)
        if dims and dims[0] == LAYER:
            run, first = run_of(self.model.program, self.forwards, name), 1
        cuts = [tuple(a for a in self.axes if held.get(a) == d) for d in range(len(t.shape))]
        extents = tuple(map(Extent, t.shape[first:], cuts[first:]))
        if not first:
            run = -1 if is_read_early(self.model.program, self.forwards, name) else -2
        return HeldParameter(name, run, LocalValue(t.itemsize, extents), sums, expert_dim(dims) is not None)

    def _step(self, block: ReadBlock, number: int, step: Step) -> None:
        loop = as_nested(step.op)
        if loop is not None:
            self._loop(block, number, step, loop)
            return
        op = computing(step.op)
        if op is None:
            return
        types = tuple(block.program.types[o] for o in step.operands)
        results = tuple(block.program.types[r] for r in step.results)
        line = line_of(number, step, types, block.names.factors[number])
        link, names = line.links, line.names
        operands = [
            OperandState(
                block.state.get(o, {}),
                block.held[o][1] if o in block.held else None,
                self.phase == FORWARD and o in block.kept,
                o in block.saved,
            )
            for o in step.operands
        ]
        made = [block.held[r][1] if r in block.held else block.parts.get(r) for r in step.results]
        chosen, passed = propagate_axes(self.serve, line, operands, made)
        written = self.phase == FORWARD and block.run >= 0 and op.decomposition(*types) is not None
        if written and refuses(self.mesh, self.layouts, step, block.program, names):
            most = max((t.local_bytes() for t in types), default=0)
            self.opened |= {
                (block.run, r) for r, t in zip(step.results, results, strict=True) if t.local_bytes() >= most
            }
        for k, o in enumerate(step.operands):
            self._want(block, o, types[k], link.operands[k], chosen, passed, step)
        extents = {
            f: Extent(n, tuple(a for a in self.axes if chosen.get(a) == f), "batch" in names.get(f, ()))
            for f, n in link.sizes.items()
        }
        for r, dims in zip(step.results, link.results, strict=True):
            state = {a: next((d for d, fs in enumerate(dims) if f in fs), PARTIAL) for a, f in chosen.items()}
            block.state[r] = state | dict.fromkeys(passed, PARTIAL)
            block.made[r] = [block.state[r]]
            block.maker[r] = op.kernel_class
        self._kernel(block, step, op, types, results, link, extents, names)
        block.made_at |= dict.fromkeys(step.results, len(self.kernels))
        block.sources |= dict.fromkeys(step.results, step.operands)

    def _kernel(
        self,
        block: ReadBlock,
        step: Step,
        op: Compute,
        types: Sequence[TensorType],
        results: Sequence[TensorType],
        link: Links,
        extents: Mapping[str, Extent],
        names: Mapping[str, Collection[str]],
    ) -> None:
        if op.view or not types or not any(t.ndim for t in (*types, *results)):
            return
        places = {f: k for k, f in enumerate(extents)}
        sides = (*zip(types, link.operands, strict=True), *zip(results, link.results, strict=True))
        values = tuple(LocalValue(t.itemsize, of_factors([f for fs in dims for f in fs], extents, names))
                       for t, dims in sides)  # fmt: skip
        roles: tuple[tuple[int, ...], ...] = ()
        if op.kernel_class == "product" and len(types) == 2:
            a, b, c = ({f for fs in dims for f in fs} for dims in (*link.operands, link.results[0]))
            picked = (a & b & c, (a & c) - b, (b & c) - a, (a & b) - c)
            roles = tuple(tuple(sorted(places[f] for f in one)) for one in picked)
        if op.kernel_class == "product" and self.phase == FORWARD and block.run >= 0:
            number = self.products[block.run] = self.products.get(block.run, -1) + 1
            if number % 2 == 0 and step.results[0] in block.needed:
                self.second[block.run, step.results[0]] = values[-1]
        whole = sum(t.local_bytes() for t in (*types, *results))
        flops, touched = work_of(op, tuple(types))
        weighs = any(o in block.held for o in step.operands) or (
            self.phase == BACKWARD
            and not any(e.batch for r in link.results for fs in r for e in (extents[f] for f in fs))
        )
        self.kernels.append(
            LocalKernel(
                self.phase,
                block.run if self.phase == FORWARD or block.run >= 0 else self._outside,
                op.kernel_class,
                types[0].dtype,
                flops,
                of_factors(tuple(extents), extents, names),
                roles,
                values,
                touched / whole if whole else 0.0,
                self.phase != FORWARD or any(r in block.needed for r in step.results),
                weighs,
                self.phase == BACKWARD and any(r in block.held or r in block.parts for r in step.results),
                joins_product(block, step, op, types, results),
                op.share(*types),
                cast_operands(block, step) if weighs and roles else (),
                len(step.operands) > 1 and all(o in block.parts for o in step.operands),
            )
        )

    _outside = -2  # the run of backward steps outside of layers: of what comes before these once they have been read

    def _want(
        self,
        block: ReadBlock,
        name: str,
        t: TensorType,
        dims: Sequence[Sequence[str]],
        chosen: Mapping[str, str],
        passed: Sequence[str],
        step: Step,
    ) -> None:
        """Note the movement of an operand to where a step has it."""
        if name in block.held:
            return
        wanted = {a: d for a, f in chosen.items() for d, fs in enumerate(dims) if f in fs}
        wanted |= {a: PARTIAL for a in passed if block.state.get(name, {}).get(a) == PARTIAL}
        op = computing(step.op)
        attends = (op is not None and op.kernel_class == "scores") or block.maker.get(name) == "scores"
        weighs = self.phase == BACKWARD and any(r in block.held or r in block.parts for r in step.results)
        self._moved(block, name, t, wanted, any(r in block.needed for r in step.results), attends, weighs)

    def _moved(
        self, block: ReadBlock, name: str, t: TensorType, wanted: State, needed: bool,
        attends: bool = False, weighs: bool = False,
    ) -> None:  # fmt: skip
        now = block.state.get(name, {})
        if dict(now) != dict(wanted):
            block.want(name, wanted)
        known = block.made.setdefault(name, [now])
        if self.phase == BACKWARD and name in block.saved and dict(wanted) in known[1:] and wanted.keys() >= now.keys():
            key, kept = block.saved[name]
            self.saved[key] = kept._replace(value=self._local(block, name, t, wanted))
        kinds: dict[tuple[bool, bool], list[str]] = {}
        for axis in self.axes:
            a, b = now.get(axis), wanted.get(axis)
            if a == b or a is None or any(one.get(axis) == b for one in known[1:]):
                continue
            kinds.setdefault((a == PARTIAL, b is None), []).append(axis)
        names = block.names.values[name]
        for summed, whole, axes, state in move_steps(kinds, t, now, wanted):
            extents = [
                Extent(n, tuple(x for x in self.axes if state.get(x) == d and x not in axes), "batch" in names[d])
                for d, n in enumerate(t.shape)
            ]
            either = [tuple(x for x in self.axes if d in (now.get(x), wanted.get(x))) for d in range(len(extents))]
            run = block.run if self.phase == FORWARD or block.run >= 0 else self._outside
            inside = self.phase == BACKWARD and block.run >= 0
            since = range(block.made_at.get(name, len(self.kernels)), len(self.kernels)) if inside and summed else ()
            beside = tuple(k for k in since if self.kernels[k].gradient)
            value = LocalValue(t.itemsize, with_slots(extents, names, either))
            early = inside and not summed and name in block.saved
            source = None if summed or whole else made_of(block, name)
            # Over axes that do not cut the value, what it was made of had been gathered by then.
            apart = {a: d for a, d in block.state.get(source or "", {}).items() if a not in axes and a in now}
            tokens = self._local(block, source, block.program.types[source], apart) if source else None
            self.moves.append(
                LocalMove(self.phase, run, summed, whole, axes, value, needed, beside, early, attends, weighs, tokens)
            )
        if dict(now) != dict(wanted):
            known.append(dict(wanted))

    def _loop(self, block: ReadBlock, number: int, step: Step, op: Nested) -> None:
        if self.phase == FORWARD:
            self.layers.append(op.times)
            run = len(self.layers) - 1
        else:
            run = next((self.alike[o][0] for o in step.operands if o in self.alike), 0)
            self._outside = -1
        inner = ReadBlock(op.body, block.names.bodies[number], run)
        whole = len(op.body.inputs) - op.cut
        for k, (outside, (name, t)) in enumerate(zip(step.operands, op.body.inputs, strict=True)):
            less = 1 if k >= whole else 0
            state = (
                canonical_state(block, outside, self.serve) if k < op.carried_count else block.state.get(outside, {})
            )
            if k < op.carried_count:
                self._moved(block, outside, t, state, needed=True)
                if not k and self.phase == FORWARD:
                    self.carried, self.entering[run] = self._local(inner, name, t, state), name
            inner.state[name] = {a: d - less if d != PARTIAL else d for a, d in state.items()}
            inner.made[name] = [inner.state[name]]
            for other in no_larger([state, *block.made.get(outside, [])[1:]]):
                inner.made[name].append({a: d - less if d != PARTIAL else d for a, d in other.items()})
            if outside in block.held:
                of, held = block.held[outside]
                inner.held[name] = of, {a: d - less for a, d in held.items()}
                inner.state[name] = inner.held[name][1]
            elif self.phase == BACKWARD and less and outside in self.alike:
                into = next((computing(s.op) for s in op.body.steps if name in s.operands), None)
                kept = Saved(run, self._local(inner, name, t, inner.state[name]), block.maker.get(outside, ""),
                             into.kernel_class if into else "")  # fmt: skip
                key = run, self.alike[outside][1]
                if key not in self.opened:
                    inner.saved[name] = key, kept
                    self.saved[key] = kept
        for outside, name in zip(step.results, op.body.outputs, strict=True):
            if outside in self.owners:
                of, held = block.held[outside]
                inner.held[name] = of, {a: d - 1 for a, d in held.items()}
        inner.needed, inner.kept = needed_inside(op, step, block), {*op.body.outputs[op.carried_count :]}
        for n, one in enumerate(op.body.steps):
            inner.number = n
            self._step(inner, n, one)
        if self.model.origins:
            rows = self._rows(step, op, run, block) if self.phase == BACKWARD else {}
            self.lives.append(layer_life(inner, op, rows, partial(self._local, inner)))
        for k, (outside, name) in enumerate(zip(step.results, op.body.outputs, strict=True)):
            state = inner.state.get(name, {})
            if k < op.carried_count:
                entered = inner.state[op.body.inputs[k][0]]
                self._moved(inner, name, op.body.types[name], entered, needed=True)
                state = entered
                block.state[outside] = state
                block.made[outside] = [state]
                continue
            block.state[outside] = {a: d + 1 if d != PARTIAL else d for a, d in state.items()}
            block.made[outside] = [
                {a: d + 1 if d != PARTIAL else d for a, d in one.items()} for one in inner.made.get(name, [state])
            ]
            block.maker[outside] = inner.maker.get(name, "")
            self.alike[outside] = run, name

    def _rows(self, step: Step, op: Nested, run: int, block: ReadBlock) -> dict[str, str]:
        """The rows that a body runs back from, by name: `input` is what entered the layer, else the kernel's kind."""
        found: dict[str, str] = {}
        for outside, (name, _) in zip(step.operands, op.body.inputs, strict=True):
            if outside in self.alike and outside not in block.held:
                value = self.alike[outside][1]
                found[name] = "input" if value == self.entering.get(run) else block.maker.get(outside, "")
                found[name] = "second product" if (run, value) in self.second else found[name]
                found[name] = "opened" if (run, value) in self.opened else found[name]
        return found

    def _local(self, block: ReadBlock, name: str, t: TensorType, state: State) -> LocalValue:
        names = block.names.values[name]
        extents = [
            Extent(n, tuple(a for a in self.axes if state.get(a) == d), "batch" in names[d])
            for d, n in enumerate(t.shape)
        ]
        return LocalValue(t.itemsize, with_slots(extents, names))
