"""`partition`: from a model and a strategy to a `Job`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from shardplan.core.dim_names import Names
from shardplan.core.layout import Layout
from shardplan.core.nested import row_type, stacked_type
from shardplan.core.program import Program
from shardplan.core.rebase import rebased_type
from shardplan.core.step import Step
from shardplan.core.target_counts import COUNT
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, excerpt
from shardplan.hardware.placement import Placement
from shardplan.hardware.topology import Topology
from shardplan.plans.pricing import where_of
from shardplan.strategy.held_cuts import AXES, BATCH
from shardplan.strategy.model import Model
from shardplan.strategy.options import check_options
from shardplan.strategy.partition.decomposition import refuses
from shardplan.strategy.partition.fitting import fitted
from shardplan.strategy.partition.flow import Key, Line, Loop
from shardplan.strategy.partition.job import Job, Programs, StatePart
from shardplan.strategy.partition.microbatch import WEIGHT, microbatch
from shardplan.strategy.partition.order import check_predicted, ordered
from shardplan.strategy.partition.prefetch import early
from shardplan.strategy.partition.prices import prices_on
from shardplan.strategy.partition.problem import Cut, SettleProblem, at_most
from shardplan.strategy.partition.programs import CLIPPED_UPDATES, RECEIVED, SAVED, TOTAL, StageProgram, Writers
from shardplan.strategy.partition.recomputed_layers import behind_name, model_name
from shardplan.strategy.partition.refusals import check_bucket, check_kept
from shardplan.strategy.partition.row_plans import RowPlans
from shardplan.strategy.partition.serve_remedies import warn_of_replication
from shardplan.strategy.partition.settle import Settled, settle
from shardplan.strategy.partition.split import SplitBackward, split
from shardplan.strategy.partition.stages import PipelineStage, staged
from shardplan.strategy.partition.style_tables import AskedLayouts, read_layouts
from shardplan.strategy.partition.tables import LAYER, Layouts
from shardplan.strategy.partition.transfers import SharedParameter, list_transfers
from shardplan.strategy.partition.updates import write_updates
from shardplan.strategy.partition.weigh import lightest
from shardplan.strategy.partition.write import Movement
from shardplan.strategy.strategy import Strategy
from shardplan.strategy.training import SCALE, SKIPPED

Where = Topology | Placement
TWIN = ".twin"  # of a parameter's gradient: that of the second chain of DualPipe


def partition(
    model: Model, strategy: Strategy, topo: Where | str | None = None, *, layouts: AskedLayouts = None
) -> Job:
    """Return the programs of a model under a strategy.

    Args:
        model: A training step, or a forward pass.
        strategy: Degrees, and what else is decided.
        topo: What prices are taken on; device ids are its own. By default a nominal switch. What its device does not
            state of its work is that of a nominal one.
        layouts: Tables instead of `strategy.layouts(model)`, or what of it is otherwise: `Layouts.column("*.up")`.

    Warns (`ReplicationWarning`) of an axis of whose devices the worst does more than 1.1 times an even share of the
    operations of products, with the line of the tables that deals them out; `Job.shares` has all axes.

    Raises `LayoutError` for a strategy that the model does not admit, naming line and axis, or of which an option
    does nothing.
    """
    job = make_job(model, strategy, topo, layouts=layouts)

    def settled(tables: Layouts) -> Settled:
        return _Partition(model, strategy, topo, tables).settled()[0]

    warn_of_replication(job.model, job.layouts, job.settled, settled)
    return job


def make_job(model: Model, strategy: Strategy, topo: Where | str | None = None, *, layouts: AskedLayouts = None) -> Job:
    """Do as `partition`, without a warning: for those that try many."""
    if not isinstance(model, Model) or not isinstance(strategy, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance]
        given = f"{excerpt(model)} and {excerpt(strategy)}"
        raise LayoutError(f"partition takes a Model and a Strategy, got {given}")
    check_predicted(strategy)
    check_options(model, strategy, tables=layouts is None)
    return _Partition(model, strategy, topo, layouts).job()


class _Partition:
    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        topo: Where | str | None,
        layouts: AskedLayouts,
        starts: tuple[int, ...] | None = None,
    ) -> None:
        self.starts = starts or (None if strategy.cuts is None else (0, *strategy.cuts))
        self.strategy, self.model = strategy, fitted(model, strategy)
        self.training = bool(self.model.fields["training"])
        self.schedule = ordered(strategy, self.model)
        self.chains, owners = self.schedule.copies, self.schedule.owners
        self.count = len(owners) // self.chains  # stages of a chain
        order = self.schedule.compute_only().ranks
        self.runs = {(a.stage, a.kind) for row_ in order for action in row_ if action for a in action.leaves}
        self.meshes = [strategy.mesh(self.model, rank) for rank in owners]
        self.mesh = self.meshes[0]
        self.layouts = read_layouts(layouts, self.model, strategy)
        self.where = where_of("topo", topo)
        ends = (self.mesh, *(strategy.mesh(self.model, rank) for rank in (0, strategy.pipeline - 1)))
        self.prices = prices_on(self.where or Topology.load("nominal", devices=strategy.devices), ends)
        even = strategy.sequences % (strategy.data * strategy.microbatch) == 0
        self.micro = microbatch(
            self.model,
            self.count,
            strategy.microbatches,
            strategy.recompute,
            self._refused,
            again=strategy.recompute_layers,
            even=even,
            starts=self.starts,
            rounds=strategy.rotates,
            loss_chunks=None if strategy.loss == "whole" else strategy.loss_chunks,
        )
        self._check_layouts()
        self.stages, self.boundaries = staged(self.micro, self.count)
        self.held = {name: self._held(name) for name in self.micro.dims if self._of(name) in self.model.parameters}
        self.state = self._state()
        self.replaced = {new: old for old, new in self.model.replaced.items() if old in self.micro.dims}

    def _check_layouts(self) -> None:
        """Refuse tables that say what there is not; dims that the strategy's own serve are legal in any model."""
        dims = {name: [d for d in mine if d != LAYER] for name, mine in self.model.dims.items()}
        gradients = {f"{TOTAL}{name}": dims[name] for name in map(self._of, self.micro.gradients)}
        lines = [line for block in self.micro.block.every() for line in block.lines if isinstance(line, Line)]
        served = {name: None for line in lines for names in line.names.values() for name in names}
        own = {dim: None for _, groups in self.strategy.layouts(self.model).serve for group in groups for dim in group}
        held = {name: dims[name] for name in self.model.parameters}
        self.layouts.check(dims | gradients, held, served | own, self.mesh.axes)
        for line in lines:
            strange = [a for d in (line.op.pinned_layout or Layout(())).dims for a in d if a not in AXES]
            if strange:
                what = (
                    f"the model pins %{line.results[0]} to {line.op.pinned_layout}, of the axis {excerpt(strange[0])}"
                )
                raise LayoutError(f"{what}; legal are {', '.join(AXES)}")

    def _of(self, name: str) -> str:
        """The model's name of an input: a copy's parameter, or the stack that it has rows of."""
        return self.micro.copies.get(name, self.micro.behind.get(name, name))

    def _held(self, name: str) -> Layout:
        return self.layouts.held_layout(self._of(name), self.micro.dims[name], self.mesh)

    def _refused(self, step: Step, program: Program, names: Mapping[str, Names]) -> bool:
        """Say whether an op's own rule refuses what an axis would serve."""
        return refuses(self.mesh, self.layouts, step, program, names)

    def _state(self) -> dict[str, TensorType]:
        """The types between programs of inputs and totals, as stage 0 would have all of them."""
        out: dict[str, TensorType] = {}
        model, dims = self.model, self.model.dims
        types = model.program.types
        for name, t in model.program.inputs:
            whole = Layout(((),) * t.ndim)
            parameter = name if name in model.parameters else name.rpartition(".")[0]
            held, of = self.held.get(parameter, whole), types.get(parameter, t).shape
            out[name] = self.layouts.stored_type(name, dims[name], t, self.mesh, held, of)
        for name in {COUNT, WEIGHT} & self.micro.dims.keys():
            t, axes = self.micro.block.types[name], tuple(a for a in self.mesh.axes if a in BATCH)
            out[name] = t.with_layout(Layout((axes,) * t.ndim), self.mesh)
        for name in self.micro.gradients:
            t, of = types[self._of(name)], f"{TOTAL}{self._of(name)}"
            t = TensorType(self.strategy.total_dtype or t.dtype, t.shape, (), t.mesh)
            out[TOTAL + name] = self.layouts.stored_type(of, self.micro.dims[name], t, self.mesh, self.held[name])
        for behind, name in self.micro.behind.items():
            out[behind] = out[name]
            kept = [n for n in model.replaced if n.rpartition(".")[0] == name and n not in model.parameters]
            out |= {behind_name(n, name): out[n] for n in kept}
        return out | {copy: out[name] for copy, name in self.micro.copies.items()}

    def settled(self) -> tuple[Settled, dict[Key, tuple[str, TensorType]]]:
        """Settle; and the rows that are gradients, each with its parameter and the type of its total."""
        block = self.micro.block
        ends: dict[Key, tuple[str, TensorType]] = {}
        for name, value in self.micro.gradients.items():
            key, t = self._end(value, self.state[TOTAL + name])
            ends[key] = name, t
        types = {key: one.types[key[1]] for one in block.every() for key in ends if key[0] == one.path}
        wanted = {key: TensorType(types[key].dtype, t.shape, t.layout, t.mesh) for key, (_, t) in ends.items()}
        for name in block.outputs:
            t = block.types[name]
            if name in self.replaced:
                key, last = self._end(name, self.state[self.replaced[name]])
                wanted[key] = last
            elif not t.shape:
                wanted[(), name] = t.with_layout(Layout(()), self.mesh)
        held = {key: Layout(self.held[name].dims[-types[key].ndim :]) for key, (name, _) in ends.items()}
        problem = SettleProblem(block, self.mesh, self.state, wanted, self.held, held, self._cut())
        settled = settle(problem, dict(self.layouts.serve), self.mesh.axes, self.prices)
        check_kept(self.strategy, self.micro, settled, self.held, self.state)
        for key, (name, t) in ends.items():  # a total is a sum only over what its gradient is one over
            ends[key] = name, at_most(t, settled.type_of(key))
            total, layout = self.state[TOTAL + name], ends[key][1].layout
            self.state[TOTAL + name] = total.with_layout(Layout(total.layout.dims, layout.partial, layout.reduction))
        return settled, ends

    def _cut(self) -> Cut:
        """Where the backward pass begins, and what it has of the forward pass."""
        micro, keep = self.micro, self.strategy.kept_names
        loops = [line for line in micro.block.lines if isinstance(line, Loop) and line.number >= micro.count]
        origins = [(line.block.path, micro.origins[line.number]) for line in loops]
        twins = {path: (o.forward,) for path, o in origins if o is not None and o.forward is not None}
        inputs = {n for n, _ in micro.block.inputs for pattern in keep if fnmatchcase(self._of(n), pattern)}
        saved = tuple(dict.fromkeys(v for stage in self.stages for v in stage.saved))
        parameters = inputs & self.held.keys()
        return Cut(micro.count, saved, twins, frozenset(parameters), frozenset(keep))

    def _end(self, value: str, t: TensorType) -> tuple[Key, TensorType]:
        """Where a value that leaves is made, in a body that stacks it, and its type there."""
        line = next((line for line in self.micro.block.lines if value in line.results), None)
        if isinstance(line, Loop) and (k := line.results.index(value)) >= line.op.carried_count:
            return (line.block.path, line.block.outputs[k]), row_type(t)
        return ((), value), t

    def job(self) -> Job:
        """Settle, and write the programs, each as on stage 0; then they go to their meshes.

        Where the settled seconds, and memory, cut the layers otherwise than operations do, all begins again with them.
        """
        settled, ends = self.settled()
        if self.starts is None and self.count > 1 and (better := self._better(settled)) != self.micro.cuts.starts:
            return _Partition(self.model, self.strategy, self.where, self.layouts, better).job()
        add = self.strategy.microbatches > 1
        loops = (line for stage in self.stages for line in stage.forward if isinstance(line, Loop))
        plan = RowPlans(self.where, frozenset(line.end - line.first for line in loops))
        bucket = self.strategy.bucket
        most = None if bucket is None else float(bucket)
        writers = Writers(
            self.model, settled, self.prices, plan, self.state, self.replaced, ends, add, most, self.strategy.sum_dtype
        )
        written: dict[tuple[int, str], StageProgram] = {}
        known: dict[object, StageProgram] = {}
        halves: dict[int, SplitBackward] = {}

        def once(key: object, write: Callable[[], StageProgram]) -> StageProgram:
            if key not in known:
                known[key] = write()
            return known[key]

        for stage in self.stages:
            made = {r for line in stage.forward for r in line.results}
            outputs = [o for o in self.micro.block.outputs if o in made and self._leaves(stage, o)]
            shape = (*stage.shape(), tuple(outputs), frozenset(b.seen(stage.number) for b in self.boundaries))
            one = once(("F", shape), lambda s=stage, o=outputs: writers.forward(s, o, self.boundaries))
            written[stage.number, "F"] = one
            if self.training:
                one = once(("B", shape), lambda s=stage, f=one: writers.backward(s, f, self.boundaries))
                written[stage.number, "B"] = one
                if any((s, "I") in self.runs for s in range(stage.number, len(self.meshes), self.count)):
                    key = id(one.program)
                    halves[key] = halves.get(key) or split(one.program, set(one.sent.values()))
                    written[stage.number, "I"] = StageProgram(halves[key].first, (), one.sent, {})
                    written[stage.number, "W"] = StageProgram(halves[key].rest, (), {}, {})
        if self.strategy.gathers_ahead:
            written = early(written, self.held, asked=self.strategy.prefetch is True)
        types = self._types(written)
        if self.training and self.model.fields["optimizer"]:
            owned = {*self.model.gradients, *self.micro.behind}
            gradients = {
                stage.number: {n: self._copies(n) for n in types[stage.number] if n in owned} for stage in self.stages
            }
            written |= write_updates(writers, gradients, types, once)
        for (stage, kind), one in [*written.items()] if self.chains > 1 else ():
            if kind not in CLIPPED_UPDATES:
                written[stage + self.count, kind] = one
        check_bucket(self.strategy, written.values())
        return self._job(written, settled, types)

    def _better(self, settled: Settled) -> tuple[int, ...]:
        """The cut by what layers weigh as they are settled."""
        kept = [n for n in self.state if model_name(n) in self.model.replaced.keys() - self.model.parameters.keys()]

        def size(name: str, of_row: bool) -> int:
            mine = [name, TOTAL + name, *(n for n in kept if n.rpartition(".")[0] == name)]
            types = [self.state[n] for n in mine if n in self.state and "batch" not in self.micro.dims.get(n, ())]
            return sum((row_type(t) if of_row else t).local_bytes() for t in types)

        return lightest(self.micro, self.stages, settled, self.prices, size, self.schedule)

    def _leaves(self, stage: PipelineStage, name: str) -> bool:
        """Say whether a result leaves on a stage: the last that makes it, but on all what replaces their input."""
        return (
            name in self.replaced
            or not any(name in line.results for later in self.stages[stage.number + 1 :] for line in later.forward)
            or any(isinstance(line, Loop) and name in line.results[line.op.carried_count :] for line in stage.forward)
        )

    def _copies(self, name: str) -> list[str]:
        """What is copied of a parameter for other stages, and for the other chain."""
        found = [copy for copy, of in self.micro.copies.items() if of == name]
        return found if self.chains == 1 else [*found, *(n + TWIN for n in (name, *found))]

    def _types(self, written: Mapping[tuple[int, str], StageProgram]) -> list[dict[str, TensorType]]:
        """By stage the types of all that lives there between programs, with the rows that a stage has of stacks.

        A second chain has no state of the optimizer.
        """
        found: list[dict[str, TensorType]] = []
        state = {n for n in self.model.replaced if n not in self.model.parameters}
        moments: dict[str, dict[str, TensorType]] = {}  # what optimizers keep, by parameter
        for name, t in self.state.items():
            if model_name(name) in state:
                moments.setdefault(name.rpartition(".")[0], {})[name] = t
        for stage in self.stages:
            mine: dict[str, TensorType] = {}
            for kind in ("F", "B"):
                one = written.get((stage.number, kind))
                mine |= dict(one.program.inputs) if one else {}
            for name in [n for n in mine if n in self.micro.gradients]:
                t, total = mine[name], TOTAL + name
                mine[total] = self._as_many(name, self.state[total], t)
                mine |= {n: self._as_many(name, u, t) for n, u in moments.get(name, {}).items()}
            if self.training:
                mine |= {n: self.state[n] for n in ("step", "lr", "decay", SCALE, SKIPPED) if n in self.state}
            found.append(mine)
        without = [{n: t for n, t in mine.items() if model_name(n) not in state} for mine in found]
        return [*found, *without * (self.chains - 1)]

    def _as_many(self, name: str, t: TensorType, like: TensorType) -> TensorType:
        """A type with as many rows as a parameter's has, where that has not all of them."""
        return stacked_type(row_type(t), like.shape[0]) if like.shape != self.state[name].shape else t

    def _job(
        self,
        written: Mapping[tuple[int, str], StageProgram],
        settled: Settled,
        types: list[dict[str, TensorType]],
    ) -> Job:
        meshes = self.meshes
        onto = [{self.mesh: mesh} for mesh in meshes]
        used = {key: one for key, one in written.items() if key in self.runs or key[1] in CLIPPED_UPDATES}
        shared = list(dict.fromkeys(id(one.program) for one in used.values()))
        found = {id(one.program): one.program for one in used.values()}
        which = {key: shared.index(id(one.program)) for key, one in used.items()}
        programs = Programs(tuple(found[k] for k in shared), which, tuple(meshes))
        state: dict[str, TensorType] = {}
        parts: dict[str, StatePart] = {}
        for s, mine in enumerate(types):
            for n, t in mine.items():
                if n.startswith((SAVED, RECEIVED)) or n in self.stages[s % self.count].saved:
                    continue
                key = n if len(types) == 1 else f"s{s}.{n}"
                state[key] = rebased_type(t, onto[s])
                parts[key] = StatePart(s, n, self._rows(s % self.count, n))
        shared = self._shared_parameters(types)
        made = list_transfers(written, self.mesh, meshes, types, self.boundaries, shared, self.count, self.where)
        gradients = set(self.micro.gradients.values())
        outputs = {model_name(o): self._batch_dim(o) for o in self.micro.block.outputs
                   if o not in {*self.replaced, *gradients}}  # fmt: skip
        batch = tuple(n for n, dims in self.micro.dims.items() if "batch" in dims and n not in self.model.replaced)
        movements: Mapping[tuple[int, str], tuple[Movement, ...]] = {k: one.movements for k, one in written.items()}
        return Job(self.model, self.strategy, self.layouts, self.schedule, programs, MappingProxyType(state),
                   MappingProxyType(parts), tuple(made), batch, MappingProxyType(outputs), MappingProxyType(movements),
                   settled)  # fmt: skip

    def _rows(self, stage: int, name: str) -> tuple[int, int] | None:
        """Which rows of a stack a stage has; of what is kept of a parameter those of the parameter."""
        plain = name.removeprefix(TOTAL)
        for of in (plain, plain.rpartition(".")[0]) if self.count > 1 or self.micro.behind else ():
            for line in self.stages[stage].forward:
                if isinstance(line, Loop) and of in line.operands[len(line.operands) - line.op.cut :]:
                    return self.micro.cuts.stacks.get(line.number, self.micro.cuts.rows[line.number])[stage]
        return None

    def _batch_dim(self, name: str) -> int | None:
        dims = self.micro.block.dims[name]
        return next((d for d, names in enumerate(dims) if names == ("batch",)), None)

    def _shared_parameters(self, types: list[dict[str, TensorType]]) -> Iterator[SharedParameter]:
        """Yield the parameters that several stages have: copies, and those of the second chain."""
        copies = [(n, of) for n, of in self.micro.copies.items() if of in self.model.gradients]
        for n, of in copies:
            yield SharedParameter(next(s for s, mine in enumerate(types) if n in mine), n, n, of)
        for s in range(self.count, len(types)):
            for n in [n for n in types[s] if n in self.micro.gradients]:
                yield SharedParameter(s, n, n + TWIN, self.micro.copies.get(n, n))
