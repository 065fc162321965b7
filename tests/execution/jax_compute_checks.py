"""The law of compute ops on JAX, inside `shard_map` on eight devices: a child process of `test_compute_law.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

import oracle
from compute_examples import EVEN, EXAMPLES, MESH, MeanSquare, Moments, numbers, of_dtype, of_functions
from execution.jax_child import main
from gradient_examples import GRADIENTS, arrays, sampled
from shardplan.core import reference
from shardplan.core.dtypes import NAMES
from shardplan.core.expression import Expression
from shardplan.core.namespace import NUMPY
from shardplan.core.ops import AdamW, Sgd
from shardplan.core.program import Program
from shardplan.core.reference import distribute
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType


def law() -> Any:
    """Every legal assignment that JAX has shards for, those of an example compiled as one program."""
    from shardplan.execution.jax.run import run_program

    rng, wrong = np.random.default_rng(2), list[str]()
    for example in EXAMPLES:
        arrays = example.arrays(EVEN, rng)
        whole = np.asarray(example.whole(EVEN, *arrays))
        inputs: dict[str, Any] = {}
        shards: list[Any] = []
        steps: list[Step] = []
        seen = set[tuple[object, ...]]()
        for op, types in example.legal_ones(EVEN):
            results = op.infer(*types)
            key = tuple((t.layout.dims, t.layout.partial) for t in (*types, *results))
            if key in seen or not all(t.all_even for t in (*types, *results)):
                continue  # another reduction, or root axes: on a device the same
            seen.add(key)
            names = tuple(f"x{len(steps)}.{k}" for k in range(len(types)))
            inputs.update(zip(names, types, strict=True))
            shards += [oracle.spread(a, t, rng) for a, t in zip(arrays, types, strict=True)]
            steps.append(Step(op, names, (f"y{len(steps)}",)))
        program = Program(inputs, steps, [s.results[0] for s in steps])
        for step, t, got in zip(steps, program.output_types, run_program(program, shards, timeout=60), strict=True):
            why = oracle.wrong([np.asarray(x) for x in got], t, whole)
            if why:
                wrong.append(f"{step.op} of {[str(program.types[o]) for o in step.operands]}: {why}")
        if len(steps) < example.legal // 5:
            wrong.append(f"{example.operands}: {len(steps)} assignments only")
    return wrong[:5]


def every_dtype() -> Any:
    """Ops of a dtype as one program each, beside the reference."""
    from shardplan.execution.jax.run import run_program

    rng, wrong = np.random.default_rng(3), list[str]()
    for dtype in NAMES:
        chosen = [(op, ts) for op, ts in of_dtype(dtype) if all(t.all_even for t in ts)]
        names = [tuple(f"x{k}.{j}" for j in range(len(ts))) for k, (_, ts) in enumerate(chosen)]
        steps = [Step(op, n, (f"y{k}",)) for k, ((op, _), n) in enumerate(zip(chosen, names, strict=True))]
        inputs = {n: t for ns, (_, ts) in zip(names, chosen, strict=True) for n, t in zip(ns, ts, strict=True)}
        program = Program(inputs, steps, [s.results[0] for s in steps])
        shards = [distribute(numbers(t, rng), t) for t in program.input_types]
        found, expected = run_program(program, shards, timeout=60), reference.run_reference(program, shards)
        for step, got, want in zip(steps, found, expected, strict=True):
            if not all(np.array_equal(np.asarray(x), y) for x, y in zip(got, want, strict=True)):
                wrong.append(f"{dtype}: {step.op}: {np.asarray(got[0])}, not {want[0]}")
    return wrong[:5]


def functions() -> Any:
    """Every function of expressions beside numpy's."""
    from shardplan.execution.jax.compute import jax_namespace

    wrong: list[str] = []
    for text, x in of_functions():
        e = Expression.parse(text)
        arrays = [x, x[::-1].copy()][: e.arity]
        got, want = (e.evaluate(xp, arrays, np.dtype(np.float32)) for xp in (jax_namespace(), NUMPY))
        if not np.allclose(got, want, rtol=1e-5, atol=1e-6):
            wrong.append(text)
    return wrong


def outside() -> Any:
    """Ops that the package does not have: of two results, and a composed one."""
    from shardplan.execution.jax.run import run_program

    t = TensorType("f32", (6, 12), (None, "x"), MESH)
    steps = [Step(Moments(), ("t",), ("s", "p")), Step(MeanSquare(), ("t",), ("m",))]
    program = Program({"t": t}, steps, ("s", "p", "m"))
    shards = [distribute(np.random.default_rng(4).integers(-9, 10, t.shape).astype(np.float32), t)]
    found, expected = run_program(program, shards, timeout=60), reference.run_reference(program, shards)
    return [
        f"%{name}: {np.asarray(x)}, not {y}"
        for name, got, want in zip(program.outputs, found, expected, strict=True)
        for x, y in zip(got, want, strict=True)
        if not np.allclose(np.asarray(x), y, rtol=1e-6)
    ]


def gradients() -> Any:
    """Every op of the laws of gradients beside the reference, in f32: forward and back on some assignments."""
    from shardplan.execution.jax.run import run_program

    rng, wrong, count = np.random.default_rng(6), list[str](), 0
    for example in GRADIENTS:
        given = arrays(example, EVEN, rng)
        for program in sampled(example, EVEN, 3):
            if not all(t.all_even for t in program.types.values()):
                continue
            values = [*given, *(rng.normal(size=t.shape) for t in program.input_types[len(given) :])]
            shards = [oracle.spread(x, t, rng) for x, t in zip(values, program.input_types, strict=True)]
            found, expected = run_program(program, shards, timeout=60), reference.run_reference(program, shards)
            count += 1
            for name, got, want in zip(program.outputs, found, expected, strict=True):
                for x, y in zip(got, want, strict=True):
                    if not np.allclose(np.asarray(x), y, rtol=1e-3, atol=1e-3 * max(1, np.abs(y).max(initial=0))):
                        wrong.append(f"{program.steps[0].op}: %{name} of {program}")
                        break
    return wrong[:5] if count > 2 * len(GRADIENTS) else [f"{count} programs only"]


def updates() -> Any:
    """Updates of a parameter beside the reference."""
    from shardplan.execution.jax.run import run_program

    rng, (t, step) = np.random.default_rng(7), (TensorType.parse(text, MESH) for text in ("f32[6, 12@x]", "i32[]"))
    given = {"w": t, "g": t, "m": t, "v": t, "step": step}
    steps = [Step(Sgd(0.1), ("w", "g"), ("a",)), Step(AdamW(0.1, decay=0.2), (*given,), ("b", "c", "d"))]
    program = Program(given, steps, ("a", "b", "c", "d"))
    shards = [distribute(rng.random(t.shape).astype(np.float32), t) for _ in range(4)]
    shards.append(distribute(np.asarray(3, np.int32), step))
    found, expected = run_program(program, shards, timeout=60), reference.run_reference(program, shards)
    return [
        f"%{name}: {np.asarray(x)}, not {y}"
        for name, got, want in zip(program.outputs, found, expected, strict=True)
        for x, y in zip(got, want, strict=True)
        if not np.allclose(np.asarray(x), y, rtol=1e-5)
    ]


CHECKS = (law, every_dtype, functions, outside, gradients, updates)

if __name__ == "__main__":
    main(CHECKS)
