"""Programs and jobs that are fused: with the constants of a transport so slow that all that can be fused is."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import shardplan as sp
from core.test_fused import BAGS, EXPERTS, GATHER, GEMV, LAYERS, SCATTER, ULYSSES, shards
from shardplan.core.gradients import gradients
from shardplan.core.ops import Einsum, Elementwise, ReduceDims
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.fused.deciding.fuse import fuse
from shardplan.fused.deciding.rows import Fusion
from shardplan.hardware.prices.fused import FusedConstants
from strategy.jobs import arrays, model

EAGER = FusedConstants("shm", latency=1e-6, bandwidth=1e3, copy_bandwidth=1e2, signal=0.0, source="made up")
ONE_SHOT = FusedConstants("shm", latency=1.0, bandwidth=1e9, copy_bandwidth=1e9, signal=0.0, source="made up")
SMALL = "one box"


class FusedCase(NamedTuple):
    """What is run, fused and not, on what, and how many ops of it are fused."""

    name: str
    plain: Any
    fusion: Fusion[Any]
    given: Any

    @property
    def fused(self) -> int:
        """The rows that were fused."""
        return sum(row.is_fused for row in self.fusion.rows)


def box(size: int) -> sp.Topology:
    """One switch."""
    return sp.Topology.parse(
        f'name = "{SMALL}"\n[[levels]]\nname = "gpu"\nsize = {size}\nlink = "switch"\nbandwidth = "1 GB/s"\n'
        'latency = "1 us"\n'
    )


def program_case(name: str, program: Program, constants: FusedConstants = EAGER) -> FusedCase:
    """A program with random inputs."""
    return FusedCase(name, program, fuse(program, box(max(program.devices) + 1), constants), shards(program))


def recommender() -> Program:
    """A step of a DLRM whose tables are sharded: bags of three tables, a product with pairs, a loss, its gradients."""
    bags = Program.parse(BAGS)
    w = sp.TensorType.parse("f32[3, 3, 5]", bags.inputs[0][1].mesh)
    steps = [
        *bags.steps,
        Step(Einsum("bnd,bmd->bnm"), ("y", "y"), ("pairs",)),
        Step(Einsum("bnm,nmo->bo"), ("pairs", "w"), ("top",)),
        Step(Elementwise("relu(a) ** 2"), ("top",), ("cost",)),
        Step(ReduceDims((0, 1)), ("cost",), ("loss",)),
    ]
    forward = Program([*bags.inputs, ("w", w)], steps, ("loss",))
    moved = {"embedding_bag", "expand", "concat"}
    return gradients(forward, "loss", ["t", "u", "d", "w"], lambda step, laid: step.op.name not in moved).program


def job_case(name: str, family: str, fields: dict[str, Any], degrees: dict[str, Any]) -> FusedCase:
    """A job with random inputs."""
    strategy = sp.Strategy(**degrees)
    job = sp.partition(model(family, dtype="f32", **fields), strategy)
    big = job.model.resize(batch=strategy.sequences) if fields.get("training", True) else job.model
    given = {n: x.astype(np.float32) if x.dtype == np.float64 else x for n, x in arrays(big, big.program).items()}
    return FusedCase(name, job, fuse(job, box(strategy.devices), EAGER), given)


def cases() -> list[FusedCase]:
    """All of them, on at most four ranks."""
    four = EXPERTS.replace("2@x", "4@x").replace("f32[2, 4@x", "f32[4, 4@x")
    decode = {"training": False, "seq": 1, "cache": 8, "batch": 4}
    return [
        program_case("experts", Program.parse(EXPERTS)),
        program_case("two experts a rank", Program.parse(four)),
        program_case("layers", Program.parse(LAYERS)),
        program_case("gemv", Program.parse(GEMV)),
        program_case("gemv in one shot", Program.parse(GEMV), ONE_SHOT),
        program_case("ulysses", Program.parse(ULYSSES.replace("y=2, x=3", "y=2, x=2"))),
        program_case("bags", Program.parse(BAGS)),
        program_case("gathered rows", Program.parse(GATHER.replace("x=3", "x=2"))),
        program_case("cut sums", Program.parse(SCATTER.replace("x=3", "x=2").replace("9@x", "8@x"))),
        program_case("dlrm step", recommender()),
        job_case("llama decode", "llama", decode, {"tensor": 2, "global_batch": 4, "microbatch": 4}),
        job_case("mixture step", "moe", {"optimizer": "sgd"}, {"data": 2, "expert": 2, "global_batch": 4}),
        job_case("dlrm job", "dlrm", {"optimizer": "sgd"}, {"data": 4, "expert": 4, "global_batch": 8}),
    ]  # fmt: skip
