"""Shardy's own resharding pass as a baseline: `sdy-reshard-to-collectives` on a module with one `sdy.reshard`.

Source: the pass that ships in jaxlib (checked with 0.10.2), called through `jaxlib.mlir.passmanager`. The
`out_sharding` of each op it emits, sub-axes `"x":(m)k` included, is replayed as boxes; the last one is compared with
the asked sharding.

Caveats: on some meshes with an axis of size 3 the pass breaks its own verifier, or ends silently in another sharding;
both come back with `correct` false. Uneven dims are refused here: Shardy pads them, which boxes do not describe.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.problem import Cuts, Factor, Kind, Moves, Problem, Step, replay

__all__ = ["TESTS", "module_text", "plan", "run_pass", "steps_of_text", "versions"]

TESTS = Path(__file__).with_name("shardy_tests.txt")
PIPELINE = "builtin.module(func.func(sdy-reshard-to-collectives))"
_DTYPES = {1: "i8", 2: "bf16", 4: "f32", 8: "f64"}
_KINDS: dict[str, Kind] = {
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "collective_permute": "permute",
    "all_slice": "slice",
}
_OP = re.compile(r"= sdy\.(\w+)\s+(?:\[(.*)\]\s+)?%\w+\s+out_sharding\s*=\s*<@\w+, \[(.*?)\]")
_ANY_OP = re.compile(r"= (sdy\.\w+)")
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')


def plan(problem: Problem) -> Moves:
    """What the pass makes of `problem`; needs jax and jaxlib."""
    if not problem.even:
        return Moves.failed("uneven dims are padded by Shardy and not counted here")
    try:
        text, seconds = run_pass(problem)
    except Exception as failure:  # MLIR raises its verifier's errors: a peer's failure is data here
        return Moves.failed(f"{type(failure).__name__}: {failure}")
    try:
        steps = steps_of_text(problem, text)
    except ValueError as failure:
        return Moves.failed(str(failure), seconds)
    return replay(problem, steps, seconds)


def run_pass(problem: Problem) -> tuple[str, float]:
    """The module after the pass, and the seconds that the pass alone took."""
    from jax._src.interpreters import mlir  # the public modules offer no context with the dialects registered
    from jaxlib.mlir import ir, passmanager

    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(module_text(problem))
        manager = passmanager.PassManager.parse(PIPELINE)
        started = time.perf_counter()
        manager.run(module.operation)
        return str(module), time.perf_counter() - started


def module_text(problem: Problem) -> str:
    """The module that the pass is given: one function with one `sdy.reshard`."""
    mesh = ", ".join(f'"{name}"={size}' for name, size in problem.mesh)
    tensor = "tensor<" + "".join(f"{n}x" for n in problem.shape) + f"{_DTYPES[problem.itemsize]}>"
    return f"""module {{
  sdy.mesh @mesh = <[{mesh}]>
  func.func @main(%arg0: {tensor} {{sdy.sharding = #sdy.sharding<@mesh, {_layout(problem.src)}>}}) -> {tensor} {{
    %0 = sdy.reshard %arg0 <@mesh, {_layout(problem.dst)}> : {tensor}
    return %0 : {tensor}
  }}
}}
"""


def steps_of_text(problem: Problem, text: str) -> list[Step]:
    """The steps of a module that went through the pass; ValueError names an op that is not understood."""
    steps = []
    for line in text.splitlines():
        if not (any_op := _ANY_OP.search(line)):
            continue
        found = _OP.search(line)
        kind = _KINDS.get(found[1]) if found else None
        if not found or not kind:
            raise ValueError(f"{any_op[1]} is left or unknown after the pass: {line.strip()!r}")
        moved = _factors(problem, found[2] or "")
        q = math.prod(factor.size for factor in moved)
        detail = "" if found[2] is None else f" q={q} [{found[2]}]".replace('"', "")
        after: Cuts = tuple(_factors(problem, dim) for dim in re.findall(r"\{([^}]*)\}", found[3]))
        steps.append(Step(kind, q, after, kind + detail))
    return steps


def versions() -> dict[str, str]:
    """The versions of the packages this baseline rests on."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def _layout(dims: Sequence[Sequence[str]]) -> str:
    def name(axis: str) -> str:
        whole, _, part = axis.partition(":")
        return f'"{whole}":{part}' if part else f'"{whole}"'

    return "[" + ", ".join("{" + ", ".join(map(name, axes)) + "}" for axes in dims) + "]"


def _factors(problem: Problem, text: str) -> tuple[Factor, ...]:
    sizes = dict(problem.mesh)
    return tuple(
        Factor(name, int(major or 1), int(size) if size else sizes[name]) for name, major, size in _AXIS.findall(text)
    )
