"""Programs on torch.distributed (gloo, nccl): one process a device, launched by torchrun; device ids are global ranks.

`run_program` is the backend; `TorchExecutable` is a program bound to one rank, which the drop-ins of `interop.torch`
keep and `launch` again and again. Inputs are read only; a result may be an input itself where nothing changes between.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from shardplan.core.op import Op
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.text import op_text
from shardplan.errors import BackendError, LayoutError
from shardplan.execution.async_executor import Bound, Hands, Running, drive_steps, finish, run_under_watch
from shardplan.execution.job_backend import JobBackend, JobLaunch, Shards
from shardplan.execution.lower import by_output, check_own_ids, own_shards, place_of
from shardplan.execution.rank_names import NAME_DIGITS, format_ranks
from shardplan.execution.record import Record, StepSpan
from shardplan.execution.torch.clock import gather_spans, offset
from shardplan.execution.torch.dtypes import to_numpy, to_torch, torch_dtype
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.fused import bind_fused
from shardplan.execution.torch.group_state import GroupState, group_state
from shardplan.execution.torch.libraries import device_among
from shardplan.execution.torch.pack import maker
from shardplan.execution.torch.refusal import refuse, refusing
from shardplan.execution.torch.steps import bind_step as own_bind
from shardplan.execution.torch.wire import TorchWire

MOST_BOUND = 256  # programs bound to a rank that are remembered: views and messages of their steps, no tensors
Values = dict[str, torch.Tensor]
Binder = Callable[[Op, Sequence[TensorType], Sequence[TensorType], int], Bound[TorchWire]]


class Need(NamedTuple):
    """What a rank must pass as an input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    text: str  # the type, for messages


class Runnable(Protocol):
    """What `launch` runs on this process: a program, or what has programs and more to do around them.

    `ranks` take part, `device` is this one; `digest` is the identity, equal on all ranks, `name` and `texts` (a line a
    step) are for messages. `needs` says what to pass by input, None where this rank has no part of it.
    """

    ranks: tuple[int, ...]
    device: int
    digest: str
    name: str
    texts: list[str]
    needs: dict[str, Need | None]

    def drive(self, values: Values, wire: TorchWire, watch: TorchWatch, record: Record | None = None) -> Running:
        """Run on `values`, the inputs by name, which is emptied on the way; yields while messages travel."""
        ...


class TorchExecutable:
    """A program bound to the process of one device: everything that follows from types is worked out once.

    `device` is the device id (global rank), `bind` makes its steps: the lab has an engine of its own. Raises
    `BackendError` for an op that torch cannot run.
    """

    def __init__(self, program: Program, device: int, bind: Binder = own_bind) -> None:
        """Bind every step that the device takes part in."""
        self.program = program
        self.device = device
        self.ranks = program.devices
        text = str(program)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self.name = f"program {self.digest[:NAME_DIGITS]}"
        self.needs: dict[str, Need | None] = {}
        for name, t in program.inputs:
            place = place_of(t, device)
            shape = None if place is None else t.local_shape(place)
            self.needs[name] = None if shape is None else Need(shape, torch_dtype(t.dtype), str(t))
        self.input_name = program.inputs[0][0] if program.inputs else ""
        place = place_of(program.output_types[0], device) if program.outputs else None
        self.result_shape = (0,) if place is None else program.output_types[0].local_shape(place)
        self.texts = [op_text(s.op, s.operands) for s in program.steps]
        overlap = partial(bind_fused, device=device) if bind is own_bind else None  # the lab measures its own engine
        hands = Hands(device, lambda op, t, u: bind(op, t, u, device), partial(maker, device=device), overlap)
        self.steps = hands.steps(program)

    def drive(
        self, values: Values, wire: TorchWire, watch: TorchWatch, record: Record | None = None, first: int = 0
    ) -> Running:
        """Run the steps on `values`, the inputs by name, which is emptied on the way; yields while messages travel.

        They are numbered from `first` on, where other programs ran before this one.
        """

        def note(number: int, start: float, before: int) -> None:
            if wire.device.type == "cuda":  # a step ends where its kernels do
                torch.cuda.synchronize(wire.device)
            if record is not None:
                span = StepSpan(self.device, first + number, start, time.monotonic(), wire.received - before)
                record.spans.append(span)

        noted = None if record is None else note
        return drive_steps(
            self.steps, values, self.program.outputs, wire, lambda step: watch.begin_step(first + step), noted
        )


@lru_cache(maxsize=MOST_BOUND)
def executable(program: Program, device: int) -> TorchExecutable:
    """Return the program bound to a device; remembered."""
    return TorchExecutable(program, device)


class JobTurn(NamedTuple):
    """What a program is a part of: the watch that all parts share, and its turn among them."""

    watch: TorchWatch
    turn: int


def has_agreed(bound: Runnable, values: Values, kind: str = "") -> bool:
    """Say whether the ranks have come with this program before: else the next launch waits for all of them."""
    state = group_state()
    device, _ = device_of(bound, values, state, kind)
    return len(bound.ranks) == 1 or _identity(bound, state, device)[0] in state.agreed


def device_of(bound: Runnable, values: Values, state: GroupState, kind: str = "") -> tuple[torch.device, str]:
    """Return where this rank's shards lie, or arrive: see `launch`; and what is wrong where no message goes there."""
    given = next((x.device for name, x in values.items() if bound.needs[name]), None)
    device = given or device_among(state.libraries, kind)
    if len(bound.ranks) == 1 or device.type in state.libraries:
        return device, ""
    carried = ", ".join(f"{k} ({library})" for k, library in state.libraries.items())
    wrong = f"rank {bound.device} has its shards on {device}, but its process group carries {carried} only"
    return device_among(state.libraries), "" if device.type == "meta" else wrong  # `misfit` tells of that


def _identity(bound: Runnable, state: GroupState, device: torch.device) -> tuple[str, str]:
    """The digest and the name by which ranks agree: where a group has several libraries, these do not meet."""
    if len(bound.ranks) == 1 or len(set(state.libraries.values())) == 1:
        return bound.digest, bound.name
    return f"{bound.digest}@{device.type}", f"{bound.name} on {device.type} by {state.libraries[device.type]}"


def launch(
    bound: Runnable,
    values: Values,
    timeout: float,
    *,
    problem: str = "",
    kind: str = "",
    record: Record | None = None,
    of_job: JobTurn | None = None,
) -> Running:
    """Run a program, or a move, on the shards of this rank; every rank of it launches it, in one order.

    Nothing happens before the generator is first resumed: then the ranks agree, where they have not, and the first
    messages are posted.

    Args:
        bound: A program bound to this rank, or what has some.
        values: The shards by input, emptied on the way.
        timeout: Seconds that any wait for other ranks may take.
        problem: What is wrong already, a line: the run is refused on every rank.
        kind: The type of device on which a rank without a shard has its result, as `cuda`; by default that of the
            process group.
        record: Takes the start and the end of every step.
        of_job: What it is a part of, where the ranks have agreed on more than this program.

    Returns:
        A generator that yields while messages travel; its value is the results.

    Raises:
        LayoutError: A shard on some rank is not what its type says.
        BackendError, TimedOut: Another program on another rank, a peer that failed or did not arrive in time.
    """
    state = group_state() if of_job is None else of_job.watch.state
    device, wrong = device_of(bound, values, state, kind)
    digest, name = _identity(bound, state, device)
    watch = (
        TorchWatch(bound.ranks, bound.device, name, digest, bound.texts, timeout, state)
        if of_job is None
        else of_job.watch
    )
    if strange := sorted(set(bound.ranks) - set(state.ranks)):
        raise BackendError(
            f"{bound.name} runs on rank {strange[0]}, which its process group lacks; legal are "
            f"{format_ranks(state.ranks)}"
        )
    problem = problem or wrong or prepare_shards(bound, values, device)
    wire = TorchWire.of(watch, device)
    shift = 0.0
    try:
        running = bound.drive(values, wire, watch, record)
        if of_job is None:
            watch.begin(problem)
            shift = 0.0 if record is None else offset(wire, bound.ranks, bound.device)
        elif problem:
            raise LayoutError(f"{bound.name}: {problem}")
        else:
            wire.tag = watch.tag_of(of_job.turn)
            running = run_under_watch(running, watch, bound.texts)
        while state.ended:
            state.ended.popleft().compare_posts()
        results = yield from (on_stream(running) if wire.is_streamed else running)
        if wire.is_streamed:  # its data has yet to come
            state.ended.append(wire)
        else:
            wire.compare_posts()
        if record is not None and of_job is None:
            record.spans[:] = gather_spans(wire, bound.ranks, bound.device, record.spans, shift)
        return results
    except GeneratorExit:  # never finished: the process group was destroyed before the process ended, or a job failed
        if of_job is not None:
            wire.abandon()
        raise
    except BaseException as error:
        watch.broke(error, wire)
        wire.abandon()
        raise


def on_stream(running: Running) -> Running:
    """Run on the stream that is current at the start, whichever is at a later resumption; that one then waits for it.

    What a step allocates is given back for that stream, on which all that reads or writes it stands in line.
    """
    stream = torch.cuda.current_stream()
    while True:
        with torch.cuda.stream(stream):
            try:
                next(running)
            except StopIteration as stop:
                results: list[torch.Tensor] = stop.value
                break
        yield
    caller = torch.cuda.current_stream()
    if caller != stream:
        caller.wait_stream(stream)
        for x in results:
            x.record_stream(caller)
    return results


def prepare_shards(bound: Runnable, values: Values, device: torch.device) -> str:
    """Make every shard in `values` contiguous; or return what is wrong with one, of which nothing is read then."""
    for name, x in values.items():
        need = bound.needs[name]
        wrong = "" if need is None else misfit(x, need, device)
        if wrong:
            return f"input %{name}, rank {bound.device}: a shard {wrong}"
        if x.is_conj() or x.is_neg():  # flags, which the bytes do not show
            values[name] = x.resolve_conj().resolve_neg().contiguous()
        elif need is not None and not x.is_contiguous():
            values[name] = x.contiguous()
    return ""


def misfit(x: torch.Tensor, need: Need, device: torch.device) -> str:
    """Say in what a shard is not what is needed; an empty text where it is. Its elements are not read."""
    if x.shape != need.shape or x.dtype != need.dtype:
        return (
            f"of dtype {x.dtype} and shape {tuple(x.shape)}, but {need.text} needs {need.dtype} and {tuple(need.shape)}"
        )
    if x.layout is not torch.strided or x.device != device or x.is_meta:
        return (
            f"of layout {x.layout} on {x.device}; legal is {torch.strided} in the memory of one device for all inputs"
        )
    if not x.numel():
        return ""
    run = x.numel() if x.is_contiguous() else 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    reach, held = (x.storage_offset() + run) * x.itemsize, x.untyped_storage().nbytes()
    if reach > held:
        return f"that reaches byte {reach} of a storage of {held} bytes; legal is one within its storage"
    return ""


def run_program(
    program: Program, inputs: Sequence[Sequence[Any]], *, timeout: float, record: Record | None = None
) -> list[list[Any]]:
    """Run a program on this process's shards: one tensor (or array) an input whose mesh has this rank, else none.

    Returns one tensor a result whose mesh has this rank, else none. Raises as `execution.run.run` says.
    """
    rank = rank_among(program.devices, "program")
    if rank not in program.devices:
        own_shards(program, inputs, rank)
        return [[] for _ in program.outputs]
    values: Values = {}
    problem = ""
    with refusing(program.devices, "the run"):
        bound = executable(program, rank)
        try:
            values = own_values(program, inputs, rank)
            check_own_ids(program, values, rank)
        except LayoutError as error:
            problem = str(error)
    results = finish(launch(bound, values, timeout, problem=problem, record=record))
    return by_output(program, results, rank)


def decline(program: Program, error: BaseException) -> None:
    """Tell the other ranks of a program that this one raises instead of running it."""
    refuse(program.devices, "the run", error)


def rank_among(devices: Sequence[int], what: str) -> int:
    """Return the rank of this process; raises `BackendError` where there are none, or a device has none."""
    if not dist.is_available() or not dist.is_initialized():
        raise BackendError(
            "torch.distributed is not initialised: launch with torchrun and call torch.distributed.init_process_group"
        )
    world = dist.get_world_size()
    if strange := [d for d in devices if d >= world]:
        raise BackendError(
            f"the {what} runs on device {strange[0]}, but there are {world} ranks; device ids are global ranks, legal "
            f"are 0 to {world - 1}"
        )
    return dist.get_rank()


def own_values(program: Program, inputs: Sequence[Sequence[Any]], rank: int) -> Values:
    """Return the inputs by name; empty tensors stand for those on meshes without this rank."""
    given = zip(program.inputs, own_shards(program, inputs, rank).values(), strict=True)
    return {
        name: torch.empty(0, dtype=torch_dtype(t.dtype)) if own is None else _tensor(own[1]) for (name, t), own in given
    }


def join_launch(
    offered: JobLaunch, timeout: float, bound: Callable[[Program, int], TorchExecutable] = executable
) -> JobBackend | None:
    """Agree with the other ranks on a step of a job: its programs run under one watch, each with a tag of its own.

    `bound` binds a program to a device.

    Raises as `launch`, and `BackendError` where messages have no tags and would meet in another order.
    """
    rank = rank_among(offered.devices, "job")
    if rank not in offered.devices:
        return None
    watch = TorchWatch(offered.devices, rank, offered.name, offered.digest, (), timeout, parts=True)
    device = device_among(watch.state.libraries)
    if offered.streams and TorchWire.of(watch, device).batched:
        raise BackendError(f"{offered.name} moves values between pipeline stages; of torch's backends gloo runs that")
    watch.begin(str(offered.problem or ""))
    watch.state.agreed.discard(offered.digest)  # each step is agreed on: a rank may come with wrong arrays

    def start(program: Program, inputs: Sequence[Shards], turn: int, record: Record | None) -> Running:
        values = {name: x.to(device) for name, x in own_values(program, inputs, rank).items()}
        for shards in inputs:
            shards.clear()
        results = yield from launch(bound(program, rank), values, timeout, record=record, of_job=JobTurn(watch, turn))
        return by_output(program, results, rank)

    return JobBackend(
        start,
        frozenset((rank,)),
        to_numpy,
        lambda array: to_torch(array).to(device),
        lambda parts: torch.cat(tuple(parts)),
    )


def _tensor(shard: Any) -> torch.Tensor:
    return shard.detach() if isinstance(shard, torch.Tensor) else to_torch(np.asarray(shard))
