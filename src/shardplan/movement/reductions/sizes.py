"""A reduction program on payloads of other sizes and dtypes: gradients come in buckets, a plan is made for one size."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, excerpt
from shardplan.plans.plan import Plan

MOST_SIZES = 1024  # programs that are remembered


def sum_program(plan: Plan | Program) -> Program:
    """Return the program of a plan that sums one payload to all its members.

    Raises `LayoutError` for another one, and for what is no plan.

    >>> from shardplan.movement.redistribute import redistribute
    >>> from shardplan.core.mesh import Mesh
    >>> plan = redistribute("f32[8]{+a}", "f32[8]", mesh=Mesh(a=4))
    >>> print(resize_payload(sum_program(plan), "bf16", 3).input_types[0])
    bf16[3]{+a}
    """
    program = plan.program if isinstance(plan, Plan) else plan
    given: Any = program
    if not isinstance(given, Program):
        raise LayoutError(f"asked for a plan of sp.reduce or a program, not {excerpt(given)}")
    ends = [*program.input_types, *program.output_types]
    if len(ends) != 2 or ends[0].layout.reduction != "sum" or ends[1].layout.partial or ends[1].layout.root:
        raise LayoutError(
            f"asked for a program that sums one payload to all its members; this one has inputs "
            f"{', '.join(map(str, program.input_types))} and results {', '.join(map(str, program.output_types))}"
        )
    if any(ends[0].layout.dims) or any(ends[1].layout.dims):
        raise LayoutError(f"asked for a payload that is whole on every device, not {ends[0]} to {ends[1]}")
    return program


def members_of(program: Program) -> int:
    """Return how many addends a sum has."""
    (t,) = program.input_types
    return t.mesh.group_places(t.layout.partial).shape[1]


@lru_cache(maxsize=MOST_SIZES)
def resize_payload(program: Program, dtype: str, elements: int) -> Program:
    """Return the same steps on at least so many elements of a dtype: on the least rows of the dims but the last."""
    (name, t), inner = program.inputs[0], math.prod(program.input_types[0].shape[:-1])
    sized = TensorType(dtype, (*t.shape[:-1], max(1, -(-elements // inner))), t.layout, t.mesh)
    return Program({name: sized}, [Step(s.op, s.operands, s.results) for s in program.steps], program.outputs)
