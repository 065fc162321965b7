"""Programs on MPI: one process a device, launched by mpiexec; device ids are ranks of COMM_WORLD.

`run_program` is the backend. Inputs are read only; a result may be an input itself where nothing changes between the
two. What a device sends and receives goes straight from and into its arrays (`wire`), so a run allocates the
results and what reductions add up. At the first call of a program the ranks agree on it (`agreed_programs`); what fails
after that ends all ranks (`faults`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.core.text import op_text
from shardplan.errors import BackendError, LayoutError, ShardplanError
from shardplan.execution.agreement import refusing
from shardplan.execution.async_executor import Hands, Running, drive_steps, finish, run_under_watch
from shardplan.execution.job_backend import JobBackend, JobLaunch, Shards
from shardplan.execution.lower import by_output, check_own_ids, own_shards
from shardplan.execution.mpi.agreed_programs import NotStarted, agreed_programs, program_name
from shardplan.execution.mpi.faults import MpiWatch, abort
from shardplan.execution.mpi.letters import letters
from shardplan.execution.mpi.steps import Binding, bind_step, maker
from shardplan.execution.mpi.wire import DATA, TAGS, MpiWire
from shardplan.execution.mpi.world import start
from shardplan.execution.record import Record, StepSpan

REMEMBERED = 64  # bound programs whose datatypes are kept: twice what a set of ranks agrees on, since sets are several
Values = dict[str, np.ndarray]

_executables: OrderedDict[tuple[Program, int], MpiExecutable] = OrderedDict()


class MpiExecutable:
    """A program bound to the process of one device: everything that follows from types is worked out once.

    `device` is the device id (rank of the world). Raises `BackendError` for an op that MPI cannot run.
    """

    def __init__(self, program: Program, device: int) -> None:
        """Bind every step that the device takes part in."""
        self.program = program
        self.device = device
        self.texts = [op_text(s.op, s.operands) for s in program.steps]
        self.binding = Binding(device)

        def made(t: TensorType) -> Callable[[MpiWire], np.ndarray]:
            make = maker(t, device)
            return lambda wire: make()

        hands = Hands(device, lambda op, operands, results: bind_step(op, operands, results, self.binding), made)
        try:
            self.steps = hands.steps(program)
        except ShardplanError:
            self.free_datatypes()
            raise

    def free_datatypes(self) -> None:
        """Give the datatypes back to MPI; the program cannot run after it."""
        self.binding.types.free_datatypes()

    def drive(self, values: Values, wire: MpiWire, record: Record | None = None) -> Running:
        """Run the steps on `values`, the inputs by name, which is emptied on the way; yields while messages travel."""

        def begin(number: int) -> None:
            wire.watch.step = number

        def note(number: int, start: float, before: int) -> None:
            if record is not None:
                record.spans.append(StepSpan(self.device, number, start, time.monotonic(), wire.received - before))

        return drive_steps(self.steps, values, self.program.outputs, wire, begin, record and note)


def executable(program: Program, device: int) -> MpiExecutable:
    """Return the program bound to a device; the last ones are remembered, the datatypes of others freed."""
    key = (program, device)
    if key not in _executables:
        _executables[key] = MpiExecutable(program, device)
        while len(_executables) > REMEMBERED:
            _executables.popitem(last=False)[1].free_datatypes()
    _executables.move_to_end(key)
    return _executables[key]


def forget() -> None:
    """Free the datatypes of all remembered programs."""
    while _executables:
        _executables.popitem()[1].free_datatypes()


@atexit.register
@functools.cache
def end() -> None:
    """Tell the other ranks of an exception that ends this one, once, and leave MPI to its own end."""
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        error: BaseException | None = getattr(sys, "last_value", None)  # what the interpreter has printed
        if error is not None and MPI.Is_initialized() and not MPI.Is_finalized():
            agreed_programs().announce_end(error)
        forget()


@contextlib.contextmanager
def abort_on_error() -> Generator[None]:
    """End all ranks where the block raises, unless nothing has started, or is to go on."""
    try:
        yield
    except (NotStarted, GeneratorExit):
        raise
    except BaseException as error:
        abort(error)


def run_program(
    program: Program, inputs: Sequence[Sequence[Any]], *, timeout: float, record: Record | None = None
) -> list[list[np.ndarray]]:
    """Run a program on this process's shards: one array an input whose mesh has this rank, else none.

    Returns one array a result whose mesh has this rank, else none. Wrong shards, a missing launcher and an op that MPI
    cannot run raise, as `execution.run.run` says; at the first call of a program all other ranks raise too, at once, as
    they do where they come with different programs. What goes wrong later (a rank that does not come in time, or that
    withdraws from a program agreed on, an exception in a step) is printed and ends all ranks: see `faults`.
    """
    rank = rank_among(program.devices, "program")
    if rank not in program.devices:
        _values(program, inputs, rank)
        return [[] for _ in program.outputs]
    ranks, digest = program.devices, digest_of(program)
    with refusing(functools.partial(agreed_programs().refuse, ranks, rank, digest)):
        values, bound = _values(program, inputs, rank), executable(program, rank)
        check_own_ids(program, values, rank)
    watch = MpiWatch(ranks, rank, program_name(digest), bound.texts, timeout, letters())
    with abort_on_error():
        wire = MpiWire(ranks, agreed_programs().join(watch, digest, bound.binding.groups), watch)
        results = finish(bound.drive(values, wire, record))
    return by_output(program, results, rank)


def decline(program: Program, error: BaseException) -> None:
    """Tell the other ranks of a program that this one raises instead of running it."""
    rank, ranks = rank_among(program.devices, "program"), program.devices
    if rank in ranks:
        agreed_programs().refuse(ranks, rank, digest_of(program), error)


def rank_among(devices: Sequence[int], what: str) -> int:
    """Return the rank of this process, in which MPI is started; raises `BackendError` where a device has no rank."""
    rank, size = start()
    strange = [d for d in devices if d >= size]
    if strange and size == 1:
        raise BackendError(
            f"the {what} runs on device {strange[0]}, but this process is alone: launch one process a device with "
            f"mpiexec, of the MPI that mpi4py uses"
        )
    if strange:
        raise BackendError(
            f"the {what} runs on device {strange[0]}, but there are {size} ranks; device ids are ranks of COMM_WORLD, "
            f"legal are 0 to {size - 1}"
        )
    return rank


def join_launch(offered: JobLaunch, timeout: float) -> JobBackend | None:
    """Agree with the other ranks on a step of a job: all its programs share communicators, and have tags of their own.

    What their groups start on a communicator they start in one order: in each group all ranks go through its programs
    in turn. Raises as `run_program`.
    """
    rank = rank_among(offered.devices, "job")
    if rank not in offered.devices:
        return None
    digest, ranks = bytes.fromhex(offered.digest), offered.devices
    watch = MpiWatch(ranks, rank, offered.name, [], timeout, letters())
    with refusing(functools.partial(agreed_programs().refuse, ranks, rank, digest)):
        if offered.problem is not None:
            raise offered.problem
        mine = [executable(program, rank) for program in offered.programs(True) if rank in program.devices]
    with abort_on_error():
        communicators = agreed_programs().join(watch, digest, [g for bound in mine for g in bound.binding.groups])

    def started(program: Program, inputs: Sequence[Shards], turn: int, record: Record | None) -> Running:
        with abort_on_error():
            bound = executable(program, rank)
            wire = MpiWire(ranks, communicators, watch, DATA + turn % TAGS)
            values = _values(program, inputs, rank)
            for shards in inputs:
                shards.clear()
            running = bound.drive(values, wire, record)
            return by_output(program, (yield from run_under_watch(running, watch, bound.texts)), rank)

    return JobBackend(started, frozenset((rank,)))


@functools.lru_cache(REMEMBERED)
def digest_of(program: Program) -> bytes:
    """Return what tells programs apart."""
    return hashlib.sha256(str(program).encode()).digest()


def _values(program: Program, inputs: Sequence[Sequence[Any]], rank: int) -> Values:
    """Return the inputs by name, checked; empty arrays stand for those on meshes without this rank."""
    return {
        name: np.empty(0, numpy_dtype(t.dtype)) if own is None else _contiguous_shard(name, t, *own)
        for (name, t), own in zip(program.inputs, own_shards(program, inputs, rank).values(), strict=True)
    }


def _contiguous_shard(name: str, t: TensorType, place: int, shard: Any) -> np.ndarray:
    """Return a shard as a contiguous array, or raise `LayoutError` where it is not that of `place` under `t`."""
    x = np.asarray(shard)
    if x.shape != t.local_shape(place) or x.dtype != numpy_dtype(t.dtype):
        raise LayoutError(
            f"input %{name}, device {t.mesh.devices[place]}: a shard of dtype {x.dtype} and shape {x.shape}, but {t} "
            f"needs {t.dtype} and {t.local_shape(place)}"
        )
    return np.ascontiguousarray(x).reshape(x.shape)
