"""`Strategy`: degrees of parallelism and what else is decided of a training or inference step; data, and its tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from operator import attrgetter
from typing import Any, Literal, get_args

from shardplan.core import validation
from shardplan.core.dtypes import short_name
from shardplan.core.mesh import Mesh
from shardplan.errors import LayoutError, ScheduleError
from shardplan.hardware.units import limit_of
from shardplan.strategy.held_cuts import (
    BATCH,
    EXPERTS,
    EXPERTS_FROM,
    SEQUENCE,
    SHARING,
    TENSOR,
    ExpertFrom,
    axis_dim_pairs,
    cut_dims,
    deal_experts,
    expert_dim,
    held_cuts,
    sizes_of_dims,
)
from shardplan.strategy.model import Model
from shardplan.strategy.model_state import is_state_of, state_names
from shardplan.strategy.partition.tables import FREE, Layouts, TableLine, join_lines
from shardplan.strategy.schedules.schedule import Schedule
from shardplan.strategy.schedules.table import GENERATORS
from shardplan.strategy.software import Software
from shardplan.strategy.training import PRECISIONS

ContextKind = Literal["ulysses", "gather", "ring", "zigzag"]
GRADIENT_DTYPES = ("f16", "bf16", "f32", "f64")
PREDICTED = ("nvfp4",)  # precisions that are predicted, and not partitioned
NARROW = ("fp8", *PREDICTED)  # precisions of which layers' products are narrower than bf16
RECOMPUTE = ("none", "full", "selective", "selective_op")  # or a tuple of names of ops
LOSS = ("whole", "fused", "chunked")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a model runs on devices: `data * tensor * pipeline * context` of them.

    Args:
        data: Replicas that take other sequences.
        tensor: Devices that heads, hidden features of MLPs and the vocabulary are dealt out to.
        pipeline: Stages.
        context: Devices that a sequence is dealt out to.
        expert: So many devices share the experts, each whole; it divides `data * context * tensor`. A model without
            experts refuses it.
        expert_from: Which of those devices: as many as can be of `data`, then of `context`, then of `tensor`; or of
            neighbours, `tensor` first, then `context` (Megatron's with `--expert-tensor-parallel-size 1`, and
            torchtitan's), or `context` first, then `data` (Megatron's by default).
        microbatch: Sequences of a replica that go through at once.
        global_batch: Sequences of a step; `data * microbatch` by default.
        schedule: The name of a pipeline schedule, a `Schedule`, or the path of its file, which is read at once. Stages
            lie on ranks as it says; where it has sends and receives they keep their places, and what a file says of
            shards of state and of the optimizer is left out: the programs have it.
        interleave: Chunks of layers a device; by default as many as the schedule has.
        recompute: `none`; `full`: of a layer only its input is kept; `selective`: attention is computed again
            (Megatron's, arXiv 2205.05198); `selective_op`: of a layer attention and every second product are kept
            (torchtitan's); or a tuple of names of ops whose results are computed again.
        recompute_layers: Of each stage so many layers, the first, are computed again, and of the others all is kept; by
            default all are (Megatron's method `block`). A row of a loop is a layer.
        sequence_parallel: Whether the tensor axis takes the sequence where it has nothing else to take.
        zero: 1: state of the optimizer is dealt out to all that have alike parameters, `data` and `context`; 2:
            gradients too, 3: parameters too.
        fsdp: As `zero` 3; with `zero` 2 parameters stay gathered on a stage from a forward pass until no microbatch is
            in flight there.
        keep: What the backward pass has as the forward pass moved it, and does not move again: parameters, by patterns
            of their names, and what a microbatch makes that has one of these dims. Fewer bytes, and more memory.
        context_kind: `ulysses` deals out heads inside attention, `gather` gathers keys and values, `ring` sends them
            around while attention to those at hand is computed, `zigzag` too, of a sequence in an order in which
            every device has as much to do under a causal mask.
        precision: `fp32`; or `bf16` or `fp16`: parameters and all that is computed, while the optimizer updates copies
            in f32; or `fp8`: bf16, but layers multiply with their parameters in 8 bits, with one scale a tensor. By
            default as the model is. `nvfp4` is predicted, and not partitioned.
        gradient_dtype: Of accumulated gradients; by default f32 under `fp32` and `bf16`, f16 under `fp16`, and without
            a precision that of the parameter.
        reduce_dtype: In which gradients are summed over devices; by default that in which they are accumulated.
        bucket: Bytes up to which gradients are reduced together: before the update, or where they are dealt out in
            every layer, as parameters that are dealt out are gathered there; where that takes less time. By default
            those of a layer go together (as FSDP2 and Megatron send them), and before the update each alone.
        prefetch: Whether a layer's parameters that are dealt out are gathered while the layer before it runs; two
            layers of them are there at once. By default as frameworks do: under `fsdp` and `zero` 3.
        offload: Whether what a microbatch saves goes to the host until shortly before its backward pass: in the
            schedule and the account of memory; `run` leaves it where it is.
        cuts: The layers, counted from 0, that stages but the first begin with; by default stages are cut so that the
            heaviest takes the least seconds, among those that fit into the devices' memory.
        shard: The replicas in a row that state is dealt out to by `zero` and `fsdp`; by default all.
        loss: `whole`: logits with copies in f32, as the runtime has them; `fused`: one pass that keeps none; `chunked`:
            fused, and logits are made in `loss_chunks` parts of the sequence, again backward.
        loss_chunks: Parts of a `chunked` loss; they divide the sequence.
        attention, tensor_overlap, offload_layers, imbalance, dispatch, expert_products: Of `software`, which
            predictions take into account and jobs are without; see `Software`.

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
    recompute_layers: int | None = None
    sequence_parallel: bool = False
    zero: int = 0
    fsdp: bool = False
    context_kind: ContextKind = "ulysses"
    precision: str | None = None
    gradient_dtype: str | None = None
    reduce_dtype: str | None = None
    shard: int | None = None
    bucket: float | str | None = None
    offload: bool = False
    keep: str | tuple[str, ...] = ()
    prefetch: bool | None = None
    cuts: tuple[int, ...] | None = None
    loss: str = "whole"
    loss_chunks: int = 1
    expert_from: ExpertFrom = "data"
    attention: InitVar[str | None] = None
    tensor_overlap: InitVar[bool] = False
    offload_layers: InitVar[int] = 0
    imbalance: InitVar[float | None] = None
    dispatch: InitVar[str | None] = None
    expert_products: InitVar[str | None] = None
    expert_overlap: InitVar[bool] = False
    software: Software = field(init=False, default=Software())

    def __post_init__(
        self,
        attention: str | None,
        tensor_overlap: bool,
        offload_layers: int,
        imbalance: float | None,
        dispatch: str | None,
        expert_products: str | None,
        expert_overlap: bool,
    ) -> None:
        """Check every field by itself, and what hangs together."""
        of_experts = imbalance, dispatch, expert_products, expert_overlap
        said = Software(attention, tensor_overlap, offload_layers, *of_experts)
        object.__setattr__(self, "software", said)
        for name in ("data", "tensor", "pipeline", "context", "expert", "microbatch", "loss_chunks"):
            validation.whole_number(f"strategy: {name}", getattr(self, name), 1)
        validation.whole_number("strategy: zero", self.zero, 0, 3)
        validation.choice("strategy: context_kind", self.context_kind, get_args(ContextKind))
        validation.choice("strategy: expert_from", self.expert_from, EXPERTS_FROM)
        if self.rotates and self.context == 1:
            kind = self.context_kind
            raise LayoutError(
                f"strategy: context_kind={kind!r} with context=1; legal are 2 devices of a sequence and more"
            )
        inside = self.context * self.tensor
        if self.data * inside % self.expert:
            legal = [e for e in range(1, self.data * inside + 1) if self.data * inside % e == 0]
            near = [max(e for e in legal if e < self.expert), *[e for e in legal if e > self.expert][:1]]
            raise LayoutError(
                f"strategy: expert={self.expert} does not divide data * context * tensor = {self.data} * "
                f"{self.context} * {self.tensor}; the nearest legal are {near}"
            )
        replicas = self.data * self.microbatch
        if self.global_batch is None:
            object.__setattr__(self, "global_batch", replicas)
        batch = validation.whole_number("strategy: global_batch", self.global_batch, 1)
        if batch < replicas:
            raise LayoutError(
                f"strategy: global_batch={batch} is below data * microbatch = {self.data} * {self.microbatch}; "
                f"legal are {replicas} and more"
            )
        group = self.data if self.shard is None else validation.whole_number("strategy: shard", self.shard, 1)
        if self.data % group or group * inside % self.expert:
            legal = [n for n in range(1, self.data + 1) if self.data % n == 0 and n * inside % self.expert == 0]
            raise LayoutError(
                f"strategy: shard={group} does not divide data={self.data}, or expert={self.expert} does not divide "
                f"shard * context * tensor; legal are {legal}"
            )
        validation.choice("strategy: loss", self.loss, LOSS)
        if (self.loss_chunks > 1) != (self.loss == "chunked"):
            said = f"loss_chunks={self.loss_chunks} with loss={self.loss!r}"
            raise LayoutError(f"strategy: {said}; legal are 2 and more with 'chunked', else 1")
        for name in ("sequence_parallel", "fsdp", "offload", *["prefetch"][self.prefetch is None :]):
            validation.flag(f"strategy: {name}", getattr(self, name))
        if self.precision is not None:
            validation.choice("strategy: precision", self.precision, (*PRECISIONS, *PREDICTED))
        if self.shard is not None and not (self.zero or self.fsdp):
            raise LayoutError(f"strategy: shard={group} without zero or fsdp; legal is one of them, or no shard")
        if self.bucket is not None:
            object.__setattr__(self, "bucket", limit_of("strategy: bucket", self.bucket))
        if isinstance(self.recompute, str):
            validation.choice("strategy: recompute", self.recompute, RECOMPUTE)
        else:
            validation.names("strategy: recompute", self.recompute)
        if self.recompute_layers is not None:
            n = validation.whole_number("strategy: recompute_layers", self.recompute_layers, 1)
            if self.recompute == "none":
                raise LayoutError(f"strategy: recompute_layers={n} with recompute='none'; legal is None")
        object.__setattr__(self, "keep", validation.names("strategy: keep", self.keep))
        for name in ("gradient_dtype", "reduce_dtype"):
            if getattr(self, name) is not None:
                found = validation.choice(f"strategy: {name}", short_name(getattr(self, name)), GRADIENT_DTYPES)
                object.__setattr__(self, name, found)
        if self.fsdp and self.zero == 1:
            raise LayoutError("strategy: fsdp with zero=1; legal are 2, and 3, as by default")
        if self.cuts is not None:
            object.__setattr__(self, "cuts", tuple(validation.items("strategy: cuts", self.cuts, "layers")))
            layers = [validation.whole_number("strategy: cuts", n, 1) for n in self.cuts]
            if layers != sorted(set(layers)):
                raise LayoutError(f"strategy: cuts={self.cuts}; legal are layers in order, each once")
        self._order()

    def _order(self) -> None:
        """Read the schedule, where it is a file, and hold one that is not made for these sizes against them."""
        said = self.schedule
        if isinstance(said, os.PathLike) or (isinstance(said, str) and said not in GENERATORS and "." in said):
            said = Schedule.from_csv(said)
        elif not isinstance(said, Schedule):
            said = validation.choice("strategy: schedule", said, GENERATORS, ScheduleError)
        object.__setattr__(self, "schedule", said)
        if isinstance(said, str):
            chunks = GENERATORS[said].chunks
        else:
            chunks = max(said.owners.count(rank) for rank in range(len(said.ranks)))
            sizes = {"pipeline": len(said.ranks), "interleave": chunks, "microbatches": said.microbatches}
            for name, has in sizes.items():
                if getattr(self, name) not in (has, None):
                    raise ScheduleError(
                        f"strategy: {name}={getattr(self, name)} with {said.label} of {len(said.ranks)} ranks, "
                        f"{chunks} chunks and {said.microbatches} microbatches; legal is {name}={has}"
                    )
        if self.interleave is None:
            object.__setattr__(self, "interleave", chunks)
        several = validation.whole_number("strategy: interleave", self.interleave, 1)
        if isinstance(said, str) and several != chunks and not GENERATORS[said].free:
            raise ScheduleError(f"schedule {said} has {chunks} chunks a rank, {several} were asked for")

    def non_defaults(self) -> dict[str, Any]:
        """Return the fields that are otherwise than by default, and chunks where a schedule has several by default."""
        plain = {name: getattr(_PLAIN, name) for name in FIELDS} | {"global_batch": self.data * self.microbatch}
        if isinstance(self.schedule, str) and GENERATORS[self.schedule].chunks > 1:
            plain["interleave"] = None
        return {name: getattr(self, name) for name, x in plain.items() if getattr(self, name) != x}

    def __repr__(self) -> str:
        return f"Strategy({', '.join(f'{name}={x!r}' for name, x in self.non_defaults().items())})"

    @property
    def rotates(self) -> bool:
        """Whether keys and values go round the context."""
        return self.context_kind in ("ring", "zigzag")

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has; the last is filled up with rows that weigh nothing."""
        return -(-self.sequences // (self.data * self.microbatch))

    @property
    def gathers_ahead(self) -> bool:
        """Whether layers gather their parameters a layer early."""
        return (self.fsdp or self.zero == 3) if self.prefetch is None else self.prefetch

    @property
    def kept_names(self) -> tuple[str, ...]:
        """What is kept as it was moved; all parameters under `fsdp` with `zero` 2."""
        named = validation.names("strategy: keep", self.keep)
        return ("*", *named) if self.fsdp and self.zero == 2 else named

    @property
    def sequences(self) -> int:
        """The sequences of a step."""
        assert self.global_batch is not None  # set when it was made
        return self.global_batch

    @property
    def total_dtype(self) -> str | None:
        """In what gradients are added up, None for the dtype of the parameter."""
        recipe = PRECISIONS.get(self.precision or "")
        return self.gradient_dtype or (recipe and recipe.gradient)

    @property
    def sum_dtype(self) -> str | None:
        """In what gradients are summed over devices, None for the dtype of the parameter."""
        return self.reduce_dtype or self.total_dtype

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

        `replica` is the outer part of the data replicas, over which nothing is dealt out but sequences. Where a model
        has fewer key-value heads than `tensor`, that axis has the part of it that divides them, and `group` the rest,
        over which query heads of one group are dealt. Of each axis the inner part is apart where experts take it.
        """
        whole = self.stage_degrees(n for p in model.parameters.values() for dim, n in p.dims if dim == "kv_heads")
        shared = any(map(expert_dim, model.dims.values()))
        parts = deal_experts(whole, self.expert if shared else 1, self.expert_from)
        sizes = {"replica": self.data // whole["data"]}
        for axis, n in whole.items():
            sizes |= {axis: n // parts[axis], SHARING[axis]: parts[axis]}
        return {axis: n for axis, n in sizes.items() if n > 1}

    def stage_degrees(self, heads: Iterable[int] = ()) -> dict[str, int]:
        """Return the sizes of a stage's axes before experts take parts of them; `heads` are numbers of key-value heads.

        Fewer of these than `tensor` leave a part of it to `group`, the query heads of each.
        """
        tensor = math.gcd(self.tensor, *(n for n in heads if n < self.tensor))
        return {"data": self.shard or self.data, "context": self.context, "tensor": tensor,
                "group": self.tensor // tensor}  # fmt: skip

    def mesh(self, model: Model, stage: int = 0) -> Mesh:
        """Return the mesh of a stage; stages have devices in a row."""
        return Mesh(self.axes(model), devices=range(stage * self.stage, (stage + 1) * self.stage))

    def layouts(self, model: Model) -> Layouts:
        """Return the tables of a model's names; text that parses back, and that `partition` takes, edited or not."""
        axes = self.axes(model)
        held = {name: tuple(held_cuts(model, name, axes)) for name in model.parameters}
        batch, sequence = ([a for a in axes if a in these] for these in (BATCH, SEQUENCE))
        zero = 3 if self.fsdp else self.zero
        stored: list[TableLine] = []
        for name, dims in model.dims.items():
            places = [("batch", tuple(batch)), ("sequence", tuple(sequence))]
            if name not in model.parameters and not is_state_of(model, name):
                cuts = [(dim, a) for dim, a in places if a and dim in dims]
                if name in model.replaced:
                    cuts += [(dim, a) for dim, a in cut_dims(sizes_of_dims(model, name), axes) if dim not in dict(cuts)]
                stored += [TableLine((name,), tuple(cuts))] if cuts else []
        for name in model.parameters:
            taken = dict(axis_dim_pairs(held[name]))
            sums = tuple(a for a in (*batch, *sequence) if a not in taken)
            apart, left = (tuple(a for a in sums if (a == "replica") == alike) for alike in (False, True))
            free = ((FREE, apart),) if apart else ()
            if not sums:
                continue
            if zero >= 3 and free:
                stored.append(TableLine((name,), free))
            if name not in model.gradients:
                continue
            if zero >= 1 and free and any(is_state_of(model, other, name) for other in model.dims):
                stored.append(TableLine(state_names(model, name), free))
            stored.append(TableLine((f"gradient.{name}",), *((free, left) if zero >= 2 else ((), sums))))
        lines = [TableLine((name,), cuts) for name, cuts in held.items() if cuts]
        return Layouts(tuple(self._serve(axes)), join_lines(stored), join_lines(lines))

    def _serve(self, axes: Mapping[str, int]) -> Iterator[tuple[str, tuple[tuple[str, ...], ...]]]:
        """What every axis serves."""
        rest = (("sequence",),) if self.sequence_parallel else ()
        context = (("kv_heads",), ("sequence",)) if self.context_kind == "ulysses" else (("sequence",),)
        every = {
            "replica": (("batch",),),
            "data": (("batch",), (FREE,)),
            "expert": ((*EXPERTS, "batch"), (FREE,)),
            "context": context,
            "expert_context": (*context[:-1], (*EXPERTS, "sequence")),
            "tensor": (TENSOR, *rest),
            "expert_tensor": ((*EXPERTS, *TENSOR), *rest),
            "group": (("ratio", *TENSOR[1:]), *rest),
            "expert_group": ((*EXPERTS, "ratio", *TENSOR[1:]), *rest),
        }
        yield from ((axis, every[axis]) for axis in axes)


FIELDS = tuple(name for name in Strategy.__dataclass_fields__ if name != "software")  # what it takes, by name
for _name in Software.__slots__:  # read of a strategy as they are said to it
    setattr(Strategy, _name, property(attrgetter(f"software.{_name}")))
_PLAIN = Strategy()
