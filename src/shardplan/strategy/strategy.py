"""`Strategy`: degrees of parallelism and what else is decided of a training or inference step; data, and its tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from shardplan.core import border
from shardplan.core.dtypes import short_name
from shardplan.core.mesh import Mesh
from shardplan.errors import LayoutError, ScheduleError
from shardplan.hardware.units import limit_of
from shardplan.strategy.model import Model
from shardplan.strategy.partition.tables import FREE, LAYER, Axes, Layouts, TableLine
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.table import GENERATORS
from shardplan.strategy.training import PRECISIONS

ContextKind = Literal["ulysses", "gather"]
TENSOR = ("kv_heads", "ffn", "vocab")
AXES = ("replica", "data", "expert", "context", "tensor", "group")  # of a stage, outermost first
EXPERTS = ("experts", "embedding")
GRADIENT_DTYPES = ("f16", "bf16", "f32", "f64")
RECOMPUTE = ("none", "full", "selective")  # or a tuple of names of ops


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a model runs on devices: `data * tensor * pipeline * context` of them.

    Args:
        data: Replicas that take other sequences.
        tensor: Devices that heads, hidden features of MLPs and the vocabulary are dealt out to.
        pipeline: Stages.
        context: Devices that a sequence is dealt out to.
        expert: Of the `data` replicas so many share the experts; it divides `data`. Of a model without experts they
            are replicas as the others.
        microbatch: Sequences of a replica that go through at once.
        global_batch: Sequences of a step; `data * microbatch` by default.
        schedule: The name of a pipeline schedule, a `Schedule`, or the path of its file, which is read at once. Stages
            lie on ranks as it says; where it has sends and receives they keep their places, and what a file says of
            shards of state and of the optimizer is left out: the programs have it.
        interleave: Chunks of layers a device; by default as many as the schedule has.
        recompute: `none`; `full`: of a layer only its input is kept; `selective`: attention is computed again; or a
            tuple of names of ops whose results are.
        sequence_parallel: Whether the tensor axis takes the sequence where it has nothing else to take.
        zero: 1: state of the optimizer is dealt out to replicas, 2: gradients too, 3: parameters too.
        fsdp: As `zero` 3 over `data` and `context`.
        context_kind: `ulysses` deals out heads inside attention, `gather` gathers keys and values.
        precision: `fp32`; or `bf16` or `fp16`: parameters and all that is computed, while the optimizer updates copies
            in f32. By default as the model is.
        gradient_dtype: Of accumulated gradients; by default f32 under `fp32` and `bf16`, f16 under `fp16`, and without
            a precision that of the parameter.
        bucket: Bytes up to which gradients are reduced together before the update; by default each is alone.
        offload: Whether what a microbatch saves goes to the host until shortly before its backward pass: in the
            schedule and the account of memory; `run` leaves it where it is.
        cuts: The layers, counted from 0, that stages but the first begin with; by default stages are cut so that the
            heaviest takes the least seconds, among those that fit into the devices' memory.
        shard: The replicas in a row that state is dealt out to by `zero` and `fsdp`; by default all.

    Raises `LayoutError` for a value that is not legal.

    >>> Strategy(data=2, tensor=4, global_batch=16).microbatches
    8
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    microbatch: int = 1
    global_batch: int | None = None
    schedule: str | Schedule | os.PathLike[str] = "1f1b"
    interleave: int | None = None
    recompute: str | tuple[str, ...] = "none"
    sequence_parallel: bool = False
    zero: int = 0
    fsdp: bool = False
    context_kind: ContextKind = "ulysses"
    precision: str | None = None
    gradient_dtype: str | None = None
    shard: int | None = None
    bucket: float | str | None = None
    offload: bool = False
    cuts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check every field by itself, and what hangs together."""
        for name in ("data", "tensor", "pipeline", "context", "expert", "microbatch"):
            border.whole(f"strategy: {name}", getattr(self, name), 1)
        border.whole("strategy: zero", self.zero, 0, 3)
        border.choice("strategy: context_kind", self.context_kind, get_args(ContextKind))
        if self.data % self.expert:
            legal = [e for e in range(1, self.data + 1) if self.data % e == 0]
            raise LayoutError(f"strategy: expert={self.expert} does not divide data={self.data}; legal are {legal}")
        replicas = self.data * self.microbatch
        if self.global_batch is None:
            object.__setattr__(self, "global_batch", replicas)
        batch = border.whole("strategy: global_batch", self.global_batch, 1)
        if batch < replicas:
            raise LayoutError(
                f"strategy: global_batch={batch} is below data * microbatch = {self.data} * {self.microbatch}; "
                f"legal are {replicas} and more"
            )
        group = self.data if self.shard is None else border.whole("strategy: shard", self.shard, 1)
        if self.data % group or group % self.expert:
            legal = [n for n in range(self.expert, self.data + 1, self.expert) if self.data % n == 0]
            raise LayoutError(
                f"strategy: shard={group} does not divide data={self.data}, or is no multiple of expert={self.expert}; "
                f"legal are {legal}"
            )
        for name in ("sequence_parallel", "fsdp", "offload"):
            border.flag(f"strategy: {name}", getattr(self, name))
        if self.shard is not None and not (self.zero or self.fsdp):
            raise LayoutError(f"strategy: shard={group} without zero or fsdp; legal is one of them, or no shard")
        if self.bucket is not None:
            object.__setattr__(self, "bucket", limit_of("strategy: bucket", self.bucket))
            if self.zero > 1 or self.fsdp:
                raise LayoutError("strategy: bucket with gradients that are dealt out; legal are zero=0 and zero=1")
        if isinstance(self.recompute, str):
            border.choice("strategy: recompute", self.recompute, RECOMPUTE)
        else:
            border.names("strategy: recompute", self.recompute)
        if self.precision is not None:
            border.choice("strategy: precision", self.precision, tuple(PRECISIONS))
        if self.gradient_dtype is not None:
            found = border.choice("strategy: gradient_dtype", short_name(self.gradient_dtype), GRADIENT_DTYPES)
            object.__setattr__(self, "gradient_dtype", found)
        if self.fsdp and self.zero not in (0, 3):
            raise LayoutError(f"strategy: fsdp with zero={self.zero}; legal is 3, as by default")

        if self.cuts is not None:
            object.__setattr__(self, "cuts", tuple(border.items("strategy: cuts", self.cuts, "layers")))
            layers = [border.whole("strategy: cuts", n, 1) for n in self.cuts]
            if layers != sorted(set(layers)):
                raise LayoutError(f"strategy: cuts={self.cuts}; legal are layers in order, each once")
        self._order()

    def _order(self) -> None:
        """Read the schedule, where it is a file, and hold one that is not made for these sizes against them."""
        said = self.schedule
        if isinstance(said, os.PathLike) or (isinstance(said, str) and said not in GENERATORS and "." in said):
            said = Schedule.from_csv(said)
        elif not isinstance(said, Schedule):
            said = border.choice("strategy: schedule", said, GENERATORS, ScheduleError)
        object.__setattr__(self, "schedule", said)
        if isinstance(said, str):
            chunks = GENERATORS[said].chunks
        else:
            chunks = max(said.owners.count(rank) for rank in range(len(said.ranks)))
            sizes = {"pipeline": len(said.ranks), "interleave": chunks, "microbatches": said.microbatches}
            for name, has in sizes.items():
                if getattr(self, name) not in (has, None):
                    raise ScheduleError(
                        f"strategy: {name}={getattr(self, name)} with {said.called} of {len(said.ranks)} ranks, "
                        f"{chunks} chunks and {said.microbatches} microbatches; legal is {name}={has}"
                    )
        if self.interleave is None:
            object.__setattr__(self, "interleave", chunks)
        border.whole("strategy: interleave", self.interleave, 1)

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has; the last is filled up with rows that weigh nothing."""
        return -(-self.sequences // (self.data * self.microbatch))

    @property
    def sequences(self) -> int:
        """The sequences of a step."""
        assert self.global_batch is not None  # set when it was made
        return self.global_batch

    @property
    def total_dtype(self) -> str | None:
        """In what gradients are added up, None for the dtype of the parameter."""
        recipe = None if self.precision is None else PRECISIONS[self.precision].gradient
        return self.gradient_dtype or recipe

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def stage(self) -> int:
        """Devices of a pipeline stage."""
        return self.devices // self.pipeline

    def axes(self, model: Model) -> dict[str, int]:
        """Return the axes of a stage's mesh, outermost first; without those of one device.

        `expert` is the inner part of the data replicas, `replica` the outer, over which nothing is dealt out but
        sequences. Where a model has fewer key-value heads than `tensor`, that axis has the part of it that divides
        them, and `group` the rest, over which query heads of one group are dealt.
        """
        heads = {n for p in model.parameters.values() for dim, n in p.dims if dim == "kv_heads" and n < self.tensor}
        tensor = math.gcd(self.tensor, *heads) if heads else self.tensor
        shard = self.shard or self.data
        sizes = {
            "replica": self.data // shard,
            "data": shard // self.expert,
            "expert": self.expert,
            "context": self.context,
            "tensor": tensor,
            "group": self.tensor // tensor,
        }
        return {axis: n for axis, n in sizes.items() if n > 1}

    def mesh(self, model: Model, stage: int = 0) -> Mesh:
        """Return the mesh of a stage; stages have devices in a row."""
        return Mesh(self.axes(model), devices=range(stage * self.stage, (stage + 1) * self.stage))

    def layouts(self, model: Model) -> Layouts:
        """Return the tables of a model's names; text that parses back, and that `partition` takes, edited or not."""
        axes = self.axes(model)
        held = {name: tuple(_held(model, name, axes)) for name in model.parameters}
        batch = [a for a in ("replica", "data", "expert") if a in axes]
        sequence = [a for a in ("context",) if a in axes]
        zero = 3 if self.fsdp else self.zero
        stored: list[TableLine] = []
        for name, dims in model.dims.items():
            places = [("batch", tuple(batch)), ("sequence", tuple(sequence))]
            if name not in model.parameters and not _state_of(model, name):
                cuts = [(dim, a) for dim, a in places if a and dim in dims]
                if name in model.replaced:
                    cuts += [(dim, a) for dim, a in _cuts(_sizes(model, name), axes) if dim not in dict(cuts)]
                stored += [TableLine((name,), tuple(cuts))] if cuts else []
        for name in model.parameters:
            taken = dict(_axes(held[name]))
            dealt = (*batch, *(sequence if self.fsdp else ()))
            apart = [a for a in dealt if a != "replica" and a not in taken]
            free = ((FREE, tuple(apart)),) if apart else ()
            sums = tuple(a for a in (*batch, *sequence) if a not in taken)
            left = tuple(a for a in sums if a not in apart)
            if not sums:
                continue
            if zero >= 3 and free:
                stored.append(TableLine((name,), free))
            if name not in model.gradients:
                continue
            if zero >= 1 and free and any(_state_of(model, other, name) for other in model.dims):
                stored.append(TableLine((f"{name}.*",), free))
            stored.append(
                TableLine((f"gradient.{name}",), free, left)
                if zero >= 2
                else TableLine((f"gradient.{name}",), (), sums)
            )
        lines = [TableLine((name,), cuts) for name, cuts in held.items() if cuts]
        return Layouts(tuple(self._serve(axes)), _joined(stored), _joined(lines))

    def _serve(self, axes: Mapping[str, int]) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
        """What every axis serves."""
        rest = (("sequence",),) if self.sequence_parallel else ()
        context = (("kv_heads",), ("sequence",)) if self.context_kind == "ulysses" else (("sequence",),)
        every = {
            "replica": (("batch",),),
            "data": (("batch",), (FREE,)),
            "expert": ((*EXPERTS, "batch"), (FREE,)),
            "context": context,
            "tensor": (TENSOR, *rest),
            "group": (("ratio", *TENSOR[1:]), *rest),
        }
        yield from ((axis, every[axis]) for axis in axes)


def _sizes(model: Model, name: str) -> dict[str, int]:
    """The dims of a value but for layers, of which those longer than 1 can be cut."""
    sizes = zip(model.dims[name], model.program.types[name].shape, strict=True)
    return {dim: n for dim, n in sizes if dim != LAYER}


def _cuts(dims: Mapping[str, int], axes: Mapping[str, int]) -> Iterator[tuple[str, Axes]]:
    """How tensor axes cut the dims of a value, each at most once."""
    first = next((d for d in TENSOR if d in dims), None)
    both = tuple(a for a in ("tensor", "group") if a in axes)
    if first is None or not both:
        return
    if first != "kv_heads":
        if dims[first] > 1:
            yield first, both
        return
    for dim, axis in (("kv_heads", "tensor"), ("ratio", "group")):
        if axis in axes and dims.get(dim, 1) > 1:
            yield dim, (axis,)


def _held(model: Model, name: str, axes: Mapping[str, int]) -> Iterator[tuple[str, Axes]]:
    """How a parameter is held: experts one by one, and what tensor axes cut."""
    sizes = _sizes(model, name)
    dims = tuple(sizes)
    if "expert" in axes and dims and (dims[0] == "experts" or (dims[-1] == "embedding" and dims[0] == "rows")):
        dim = dims[0] if dims[0] == "experts" else "embedding"
        if sizes[dim] > 1:
            yield dim, ("expert",)
    yield from _cuts(sizes, axes)


def _axes(cuts: tuple[tuple[str, Axes], ...]) -> Iterator[tuple[str, str]]:
    return ((a, dim) for dim, axes in cuts for a in axes)


def _state_of(model: Model, name: str, parameter: str | None = None) -> bool:
    """Say whether an input is what an optimizer keeps of a parameter, or of one of them."""
    of = name.rpartition(".")[0]
    return of in model.parameters and name not in model.parameters and parameter in (None, of)


def _joined(lines: list[TableLine]) -> tuple[TableLine, ...]:
    """Lines that say the same as one."""
    found: dict[tuple[object, object], list[str]] = {}
    for line in lines:
        found.setdefault((line.dims, line.partial), []).extend(line.patterns)
    return tuple(TableLine(tuple(names), dims, partial) for (dims, partial), names in found.items())  # type: ignore[arg-type]
