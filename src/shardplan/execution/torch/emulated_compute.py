"""A step of a job on devices that are not there: what computes takes the seconds it would, what moves is sent for real.

Every op that communicates nothing is given to a `DeviceClock` with the seconds that `hardware` prices it at on the
devices of a topology, and its results are zeros. Before a message is posted, and at the end of the step, the process
sleeps until its device would have come so far: the host issues ahead, as it does with kernels, so that its own time
counts only where it is longer than what it issues. What is computed between the messages of one op sleeps there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from shardplan.core.op import Op
from shardplan.core.pattern import AtOnce, InTurn, Pattern, Work, communicates
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.errors import BackendError
from shardplan.execution.async_executor import Bound, Running, wrap_blocking
from shardplan.execution.job_arrays import zeros
from shardplan.execution.jobs import JobRun, offer
from shardplan.execution.rank_rounds import RankKernel, rank_rounds
from shardplan.execution.record import Record
from shardplan.execution.torch.pack import maker
from shardplan.execution.torch.run import TorchExecutable, join_launch
from shardplan.execution.torch.steps import bind_step
from shardplan.execution.torch.wire import TorchWire
from shardplan.hardware.prices.cost import seconds
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.strategy.partition.job import Job


@dataclass(slots=True)
class DeviceClock:
    """When a device that is not there is done with what it was given; instants are seconds of the monotonic clock.

    >>> clock = DeviceClock()
    >>> clock.give(0.002); clock.give(0.001)
    >>> before = time.monotonic(); clock.reach(); time.monotonic() >= clock.until > before
    True
    """

    until: float = 0.0
    busy: float = 0.0  # seconds that it was given, in all

    def give(self, amount: float) -> None:
        """Give it work of so many seconds, behind what it has."""
        self.until = max(self.until, time.monotonic()) + amount
        self.busy += amount

    def reach(self) -> None:
        """Sleep until it is done."""
        while (left := self.until - time.monotonic()) > 0:
            time.sleep(left)


@dataclass(slots=True)
class SleptStep:
    """A step of a job on this rank of torch.distributed, gloo; device ids are global ranks, and those of the topology.

    Args:
        job: What is run; its movements alone are real.
        topology: Whose devices compute; its links are not looked at.
        timeout: Seconds that any wait for other ranks may take.
        algorithm: As of `torch.steps.bind`.

    Call `ready` on every rank, then `go`, again and again. They raise as `sp.run` does.
    """

    job: Job
    topology: Topology
    timeout: float
    algorithm: str = ""
    clock: DeviceClock = field(default_factory=DeviceClock)
    _bound: dict[tuple[Program, int], TorchExecutable] = field(
        default_factory=dict["tuple[Program, int]", "TorchExecutable"]
    )
    _run: JobRun | None = None

    def ready(self, record: Record | None = None) -> None:
        """Agree with the other ranks, and lay out state; nothing of it is a part of the step.

        `record` takes the bytes that came, step by step; its instants are the host's, not the device's.
        """
        mine = join_launch(offer(self.job, None), self.timeout, self.executable)
        if mine is None:
            raise BackendError(f"{self.job!r} has no device on this rank; legal are the ranks of its meshes")
        self._run = JobRun(self.job, mine, zeros(self.job), record)
        self._run.begin()

    def go(self) -> None:
        """Run all actions and the optimizers; back when the device has done all that it was given."""
        run, self._run = self._run, None
        if run is None:
            raise BackendError(f"{self.job!r} is not ready on this rank; call ready() first")
        self.clock.busy = 0.0
        run.actions()
        self.clock.reach()

    def executable(self, program: Program, device: int) -> TorchExecutable:
        """Return a program bound to a device, with its compute slept; remembered."""
        key = program, device
        if key not in self._bound:
            self._bound[key] = TorchExecutable(program, device, self.bind)
        return self._bound[key]

    def bind(
        self, op: Op, operands: Sequence[TensorType], results: Sequence[TensorType], device: int
    ) -> Bound[TorchWire]:
        """Return the step of a device: what communicates as it is, all else slept."""
        clock, fabric = self.clock, Fabric(self.topology)
        pattern = op.pattern(*operands)
        if not communicates(pattern):
            makers, amount = [maker(u, device) for u in results], seconds(pattern, fabric)

            def sleep(arrays: list[torch.Tensor], wire: TorchWire) -> list[torch.Tensor]:
                clock.give(amount)
                return [make(wire).zero_() for make in makers]

            return wrap_blocking(sleep)
        found = rank_rounds(op, operands, results, device, self.algorithm)
        kernels = 0 if found is None else sum(len(one.kernels) for one in found.rounds())
        share = total_kernel_seconds(pattern, fabric) / max(1, kernels)
        inner = bind_step(op, operands, results, device, self.algorithm, partial(_sleep_kernel, clock, share))

        def run(arrays: list[torch.Tensor], wire: TorchWire) -> Running:
            clock.reach()
            return (yield from inner(arrays, wire))

        return run


def _sleep_kernel(
    clock: DeviceClock, amount: float, held: Mapping[str, torch.Tensor], kernel: RankKernel, device: torch.device
) -> None:
    """Sleep in place of a kernel between messages; its targets stay as they are."""
    clock.give(amount)
    clock.reach()


def total_kernel_seconds(pattern: Pattern, fabric: Fabric) -> float:
    """Return the seconds of the kernels that a pattern has, all of them one after another."""
    if isinstance(pattern, AtOnce):
        return sum(total_kernel_seconds(step.pattern, fabric) for step in pattern.steps)
    if isinstance(pattern, InTurn):
        return pattern.times * sum(total_kernel_seconds(step.pattern, fabric) for step in pattern.steps)
    return seconds(pattern, fabric) if isinstance(pattern, Work) else 0.0
