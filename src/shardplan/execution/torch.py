"""Programs on torch.distributed (gloo, nccl): one process a device, launched by torchrun; device ids are global ranks.

`run_program` is the backend; `Executable` is a program bound to one rank, which the drop-ins of `interop.torch` keep
and call again. Inputs are read only; a result may be an input itself where nothing changes between the two.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardplan.core.accounting import relabels
from shardplan.core.ops.base import Op
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.text import op_text
from shardplan.errors import BackendError, LayoutError, ShardplanError
from shardplan.execution.lower import own_shards, place_of
from shardplan.execution.record import Record, Span
from shardplan.execution.torch_clock import gathered, offset
from shardplan.execution.torch_dtypes import to_torch, torch_dtype
from shardplan.execution.torch_faults import Watch
from shardplan.execution.torch_steps import Bound, bind
from shardplan.execution.torch_wire import Wire

Values = dict[str, torch.Tensor]
Binder = Callable[[Op, Sequence[TensorType], Sequence[TensorType], int], Bound]


class Executable:
    """A program bound to the process of one device: everything that follows from types is worked out once.

    `device` is the device id (global rank), `bind` makes its steps: the lab has an engine of its own. Raises
    `BackendError` for an op that torch cannot run.
    """

    def __init__(self, program: Program, device: int, bind: Binder = bind) -> None:
        """Bind every step that the device takes part in."""
        self.program = program
        self.device = device
        self.ranks = program.devices
        text = str(program)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.name = f"program {self.digest[:8]}"
        self.input_name = program.inputs[0][0] if program.inputs else ""
        place = place_of(program.output_types[0], device) if program.outputs else None
        self.result_shape = (0,) if place is None else program.output_types[0].local_shape(place)
        self.texts = [op_text(s.op, s.operands) for s in program.steps]
        self.steps: list[tuple[Bound | None, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = []
        for number, (step, freed) in enumerate(zip(program.steps, program.last_uses(), strict=True)):
            operands, results = program.step_types(step)
            bound: Bound | None = None
            if not relabels(step, operands, results, freed):
                try:
                    bound = bind(step.op, operands, results, device)
                except ShardplanError as error:
                    raise type(error)(f"step {number} ({self.texts[number]}): {error}") from None
            self.steps.append((bound, step.operands, step.results, tuple(freed)))

    def drive(
        self, values: Values, wire: Wire, watch: Watch, record: Record | None = None
    ) -> Generator[None, None, list[torch.Tensor]]:
        """Run the steps on `values`, the inputs by name, which is emptied on the way; yields while messages travel."""
        for number, (bound, operands, results, freed) in enumerate(self.steps):
            watch.at(number)
            arrays = [values[o] for o in operands]
            start, before = time.monotonic(), wire.received
            out = arrays if bound is None else (yield from bound(arrays, wire))
            if record is not None:
                if wire.device.type == "cuda":
                    torch.cuda.synchronize(wire.device)
                span = Span(self.device, number, start, time.monotonic(), wire.received - before)
                record.spans.append(span)
            del arrays
            for name, array in zip(results, out, strict=True):
                values[name] = array
            del out
            for name in freed:
                values.pop(name, None)
        return [values[name] for name in self.program.outputs]


def finish(running: Generator[None, None, list[torch.Tensor]]) -> list[torch.Tensor]:
    """Run a started generator to its end, and return its results."""
    try:
        while True:
            next(running)
    except StopIteration as stop:
        return stop.value


@lru_cache(maxsize=256)
def executable(program: Program, device: int) -> Executable:
    """Return the program bound to a device; remembered."""
    return Executable(program, device)


def wire_for(watch: Watch, device: torch.device, timeout: float) -> Wire:
    """Return the wire of a run over the default process group."""
    group = dist.distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
    batched = dist.get_backend(group) != "gloo" and device.type != "cpu"
    return Wire(group, watch.tag, timedelta(seconds=timeout), device, watch, batched=batched)


def run_program(
    program: Program, inputs: Sequence[Sequence[Any]], *, timeout: float, record: Record | None = None
) -> list[list[Any]]:
    """Run a program on this process's shards: one tensor (or array) an input whose mesh has this rank, else none.

    Returns one tensor a result whose mesh has this rank, else none. Raises as `execution.run.run` says.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise BackendError(
            "torch.distributed is not initialised: launch with torchrun and call torch.distributed.init_process_group"
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    strange = [d for d in program.devices if d >= world]
    if strange:
        raise BackendError(
            f"the program runs on device {strange[0]}, but there are {world} ranks; device ids are global ranks, legal "
            f"are 0 to {world - 1}"
        )
    values: Values = {}
    for (name, t), own in zip(program.inputs, own_shards(program, inputs, rank).values(), strict=True):
        values[name] = torch.empty(0, dtype=torch_dtype(t.dtype)) if own is None else checked(name, t, *own)
    if rank not in program.devices:
        return [[] for _ in program.outputs]
    bound = executable(program, rank)
    device = next((x.device for x in values.values()), torch.device("cpu"))
    watch = Watch(bound.ranks, rank, bound.name, bound.texts, timeout)
    watch.agree(bound.digest)
    wire = wire_for(watch, device, timeout)
    try:
        shift = 0.0 if record is None else offset(wire, bound.ranks, rank)
        results = finish(bound.drive(values, wire, watch, record))
        if record is not None:
            record.spans[:] = gathered(wire, bound.ranks, rank, record.spans, shift)
    except BaseException as error:
        watch.broke(error)
        wire.abort()
        raise
    return [[] if place_of(t, rank) is None else [x] for t, x in zip(program.output_types, results, strict=True)]


def checked(name: str, t: TensorType, place: int, shard: Any) -> torch.Tensor:
    """Return a shard as a contiguous tensor, or raise `LayoutError` where it is not that of `place` under `t`."""
    x = shard.detach() if isinstance(shard, torch.Tensor) else to_torch(np.asarray(shard))
    if tuple(x.shape) != t.local_shape(place) or x.dtype != torch_dtype(t.dtype):
        raise LayoutError(
            f"input %{name}, device {t.mesh.devices[place]}: a shard of dtype {x.dtype} and shape {tuple(x.shape)}, "
            f"but {t} needs {torch_dtype(t.dtype)} and {t.local_shape(place)}"
        )
    return x.contiguous()
