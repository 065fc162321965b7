"""Microseconds a step to build, account, print and parse a large program, on 4,096 devices.

`python -m benchmarks.program_steps [--count 5]`: the program is the unrolled training step of a 96-layer transformer,
forward and backward, of einsums, elementwise ops, reductions and collectives, data parallel over 512 and tensor
parallel over 8. Beside it the same step with another width in every layer, so that no layer repeats another; and one
layer, and that as the body of a `repeat` that runs 96 times, as a whole. Every figure is cold: what the package
remembers is forgotten before. Processor time, not wall time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from benchmarks.common import arguments, record, spread, table, write

import shardplan as sp
from shardplan.core.accounting import account
from shardplan.core.nested import stacked_type
from shardplan.core.ops import AllReduce, Einsum, Elementwise, Op, ReduceDims, Repeat
from shardplan.core.program import Program
from shardplan.core.step import Step

TARGETS = {"build": 10, "account": 30, "print": 10, "parse": 40}  # microseconds a step
NEW_TARGET = 100  # of a step never seen before
DATA, TENSOR, LAYERS, SEQ, HEAD = 512, 8, 96, 2048, 128
WIDTH, WIDER = 12288, 1024  # of all layers alike; added layer by layer where none is to repeat another


T = TypeVar("T")


class Writer:
    """Inputs and steps of a program, as they are written one after another."""

    def __init__(self, mesh: sp.Mesh) -> None:
        self.mesh = mesh
        self.inputs: dict[str, sp.TensorType] = {}
        self.steps: list[Step] = []

    def given(self, name: str, text: str) -> str:
        """Add an input."""
        self.inputs[name] = sp.TensorType.parse(text, self.mesh)
        return name

    def __call__(self, op: Op, *operands: str) -> str:
        """Add a step with one result."""
        name = str(len(self.steps))
        self.steps.append(Step(op, operands, (name,)))
        return name


def layer(w: Writer, number: int, width: int) -> list[str]:
    """Write a layer, forward and backward, on an input of its own; return its results: gradients, input's first."""
    heads, inner = width // HEAD, 4 * width
    x = w.given(f"x.{number}", f"bf16[{DATA}@data, {SEQ}, {width}]")
    gain = w.given(f"gain.{number}", f"bf16[{width}]")
    wq, wk, wv = (w.given(f"{n}.{number}", f"bf16[{width}, {heads}@tensor, {HEAD}]") for n in "qkv")
    wo = w.given(f"o.{number}", f"bf16[{heads}@tensor, {HEAD}, {width}]")
    up = w.given(f"up.{number}", f"bf16[{width}, {inner}@tensor]")
    down = w.given(f"down.{number}", f"bf16[{inner}@tensor, {width}]")
    tensor, data = AllReduce(("tensor",)), AllReduce(("data",))

    normed = w(Elementwise("a*b"), x, gain)
    q, k, v = (w(Einsum("bsh,hnd->bsnd"), normed, p) for p in (wq, wk, wv))
    scores = w(Einsum("bsnd,btnd->bnst"), q, k)
    powers = w(Elementwise("exp(a-b)"), scores, w(ReduceDims((3,), "max", True), scores))
    weights = w(Elementwise("a/b"), powers, w(ReduceDims((3,), "sum", True), powers))
    mixed = w(Einsum("bnst,btnd->bsnd"), weights, v)
    middle = w(Elementwise("a+b"), x, w(tensor, w(Einsum("bsnd,ndh->bsh"), mixed, wo)))
    normed_again = w(Elementwise("a*b"), middle, gain)
    before = w(Einsum("bsh,hf->bsf"), normed_again, up)
    after = w(Elementwise("relu(a)"), before)
    out = w(Elementwise("a+b"), middle, w(tensor, w(Einsum("bsf,fh->bsh"), after, down)))

    grads = [w(data, w(Einsum("bsf,bsh->fh"), after, out))]
    d_before = w(Elementwise("where(a>0,b,0)"), before, w(Einsum("bsh,fh->bsf"), out, down))
    grads.append(w(data, w(Einsum("bsh,bsf->hf"), normed_again, d_before)))
    d_normed = w(tensor, w(Einsum("bsf,hf->bsh"), d_before, up))
    d_middle = w(Elementwise("a+b*c"), out, d_normed, gain)
    grads.append(w(data, w(Einsum("bsnd,bsh->ndh"), mixed, d_middle)))
    d_mixed = w(Einsum("bsh,ndh->bsnd"), d_middle, wo)
    d_weights = w(Einsum("bsnd,btnd->bnst"), d_mixed, v)
    rows = w(ReduceDims((3,), "sum", True), w(Elementwise("a*b"), weights, d_weights))
    d_scores = w(Elementwise("a*(b-c)"), weights, d_weights, rows)
    parts = (
        w(Einsum("bnst,btnd->bsnd"), d_scores, k),
        w(Einsum("bnst,bsnd->btnd"), d_scores, q),
        w(Einsum("bnst,bsnd->btnd"), weights, d_mixed),
    )
    grads += [w(data, w(Einsum("bsh,bsnd->hnd"), normed, d)) for d in parts]
    back = [w(Einsum("bsnd,hnd->bsh"), d, p) for d, p in zip(parts, (wq, wk, wv), strict=True)]
    summed = w(tensor, w(Elementwise("a+b+c"), *back))
    return [w(Elementwise("a+b*c"), d_middle, summed, gain), *grads]


def written(widths: list[int]) -> tuple[Writer, list[str]]:
    """Write a step of layers of these widths; return it with the names of its results."""
    w = Writer(sp.Mesh(data=DATA, tensor=TENSOR))
    return w, [name for number, width in enumerate(widths) for name in layer(w, number, width)]


def repeated() -> tuple[Writer, list[str]]:
    """Write the layers as one step, which slices what each of them takes."""
    one, results = written([WIDTH])
    w = Writer(one.mesh)
    w.inputs = {name: stacked_type(t, LAYERS) for name, t in one.inputs.items()}
    body = Program(one.inputs, one.steps, results)
    w.steps.append(Step(Repeat(LAYERS, body, sliced=len(one.inputs)), tuple(w.inputs), tuple(results)))
    return w, results


def forget() -> None:
    """Empty every cache of the package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("shardplan"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def timed(work: Callable[[], T], steps: int) -> tuple[float, T]:
    """Microseconds a step, nothing being remembered at the start; and what the work returns."""
    forget()
    started = time.process_time()
    result = work()
    return 1e6 * (time.process_time() - started) / steps, result


def measured(w: Writer, outputs: list[str], count: int) -> dict[str, list[float]]:
    """Microseconds a step of everything that `TARGETS` names."""
    found: dict[str, list[float]] = {name: [] for name in TARGETS}
    for _ in range(count):
        seconds, program = timed(partial(Program, w.inputs, w.steps, outputs), len(w.steps))
        found["build"].append(seconds)
        found["account"].append(timed(partial(account, program), len(w.steps))[0])
        seconds, text = timed(partial(str, program), len(w.steps))
        found["print"].append(seconds)
        found["parse"].append(timed(partial(Program.parse, text), len(w.steps))[0])
    return found


def main() -> None:
    parser = arguments("program_steps", "Microseconds a step of a large program.", 5, of="repetitions")
    options = parser.parse_args()
    micros: dict[str, dict[str, list[float]]] = {}
    counts: dict[str, int] = {}
    for kind, widths in (("alike", [WIDTH] * LAYERS), ("new", [WIDTH + WIDER * k for k in range(LAYERS)])):
        w, outputs = written(widths)
        counts[kind] = len(w.steps)
        micros[kind] = measured(w, outputs, options.count)
    wholes = {"one layer": written([WIDTH]), f"repeat of {LAYERS}": repeated()}
    whole = {
        kind: {n: [len(w.steps) * x / 1e3 for x in v] for n, v in measured(w, outputs, options.count).items()}
        for kind, (w, outputs) in wholes.items()
    }
    lines = [
        [name, *(spread(micros[kind][name])["median"] for kind in micros), TARGETS[name], NEW_TARGET]
        for name in TARGETS
    ]
    head = ("microseconds a step", "layers alike", "all new", "target", "new: target")
    print(table(head, lines, f"{counts['alike']} steps on {DATA * TENSOR} devices, median of {options.count}"))
    lines = [[name, *(spread(whole[kind][name])["median"] for kind in whole)] for name in TARGETS]
    print(table(("milliseconds", *whole), lines, "a layer, and 96 of them as one step"))
    result = {
        "steps": counts,
        "devices": DATA * TENSOR,
        "microseconds a step": {k: {n: spread(v) for n, v in found.items()} for k, found in micros.items()},
        "milliseconds": {k: {n: spread(v) for n, v in found.items()} for k, found in whole.items()},
        "targets": TARGETS | {"new": NEW_TARGET},
        "samples": micros,
    }
    write(options.out, record({"count": options.count}, result))


if __name__ == "__main__":
    main()
