"""GPT-2 and a Llama of random weights imported from torch.export, a jaxpr and ONNX; and a model of 175 billion weights.

`python -m benchmarks.imports [--count 3]`. The three sources are compared with each other, by the canonical form and by
counts, and each with what its own framework computes. The large model is exported by torch without weights and then
imported, in a fresh process each time: processor seconds of both parts apart, and the most memory that it held.
"""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from benchmarks.common import ROOT, arguments, record, spread, table, write
from tests.canonical.form import canonical

from shardplan.core.nested import as_nested
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.reference import run_reference
from shardplan.errors import optional
from shardplan.interop.importers import load
from shardplan.strategy import Model

GPT = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 1009, "positions": 32}  # GPT-2, of fewer words
LLAMA = {"layers": 16, "hidden": 512, "heads": 8, "kv_heads": 2, "ffn": 1408, "vocab": 1009}
IDS = (2, 32)
NAMES = {"ids": ("batch", "sequence")}
TARGETS = {"seconds": 10.0, "our seconds": 3.0, "peak GiB": 2.0}
LARGE = """
import json, re, time
from pathlib import Path
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tests.interop.torch_decoders import Gpt
from shardplan.interop.importers import load
from shardplan.core.nested import nested
started = time.process_time()
with FakeTensorMode():
    module = Gpt(layers=96, hidden=12288, heads=96, vocab=50257, positions=2048).eval()
    export = torch.export.export(module, (torch.zeros(1, 2048, dtype=torch.long),))
between = time.process_time()
model = load(export, {"ids": ("batch", "sequence")})
ended = time.process_time()
held = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps({"export": between - started, "ours": ended - between, "nodes": len(export.graph.nodes),
    "peak GiB": held / 2**20, "parameters": model.parameter_count,
    "repeats": [op.times for s in model.program.steps if (op := nested(s.op))]}))
"""


def flops(program: Program) -> float:
    """Of all steps, bodies as often as they run."""
    found = 0.0
    for step in program.steps:
        body, op = as_nested(step.op), computing(step.op)
        found += body.times * flops(body.body) if body else op.flops(*program.step_types(step)[0]) if op else 0.0
    return found


def contractions(program: Program) -> Iterator[tuple[int, str]]:
    """The products of a program with how often they run."""
    for step in program.steps:
        if (inner := as_nested(step.op)) is not None:
            yield from ((inner.times * n, said) for n, said in contractions(inner.body))
        elif step.op.name == "einsum":
            yield 1, f"{step.op} {[program.types[o].shape for o in step.operands]}"


def of_torch(kind: str, torch: Any) -> tuple[Model, dict[str, np.ndarray], np.ndarray, Model]:
    """A module through torch.export, its weights, what it computes, and the same through ONNX."""
    from tests.interop import torch_decoders as plain

    onnx: Any = optional("onnx", "onnx")
    torch.manual_seed(0)
    sizes: dict[str, Any] = GPT if kind == "gpt" else LLAMA
    module = (plain.Gpt(**sizes) if kind == "gpt" else plain.Llama(**sizes)).eval()
    for p in module.parameters():
        p.data = 0.02 * torch.randn(p.shape) + (p.ndim == 1)
    ids = torch.randint(1009, IDS, dtype=torch.int32)
    model = load(torch.export.export(module, (ids,)), NAMES)
    opened = module
    if kind == "llama":  # ONNX has no op for an RMS norm before opset 23: there it is written out
        opened = plain.Llama(**sizes, norm=plain.OpenGain).eval()
        opened.load_state_dict(module.state_dict())
    file: Any = io.BytesIO()
    torch.onnx.export(opened, (ids,), file, dynamo=False, opset_version=17, input_names=["ids"],
                      do_constant_folding=False)  # fmt: skip
    other = load(onnx.load_from_string(file.getvalue()), NAMES)
    held = {n: p.detach().numpy() for n, p in module.named_parameters()}
    return model, held | {"ids": ids.numpy()}, module(ids).detach().numpy(), other


def of_jax(kind: str, jax: Any) -> tuple[Model, dict[str, np.ndarray], np.ndarray]:
    """A function of JAX, its weights, and what it computes."""
    from tests.interop import jax_decoders as plain

    g, c = GPT, LLAMA
    if kind == "gpt":
        function = partial(plain.gpt, heads=g["heads"])
        shapes = plain.gpt_shapes(g["layers"], g["hidden"], g["vocab"], g["positions"])
    else:
        function, shapes = plain.llama, plain.llama_shapes(*c.values())
    leaf: Any = lambda x: isinstance(x, tuple)  # noqa: E731
    rng = np.random.default_rng(0)
    p = jax.tree.map(lambda s: (0.02 * rng.normal(size=s) + (len(s) == 1)).astype("f4"), shapes, is_leaf=leaf)
    ids = rng.integers(0, 1009, IDS).astype("i4")
    model = load(jax.make_jaxpr(function)(p, ids), NAMES)
    leaves = jax.tree_util.tree_flatten_with_path(p)[0]
    held = {
        "p." + ".".join(str(getattr(k, "key", getattr(k, "idx", ""))) for k in path): np.asarray(x)
        for path, x in leaves
    }
    return model, held | {"ids": ids}, np.asarray(jax.jit(function)(p, ids))


def facts(model: Model, held: dict[str, np.ndarray], wanted: np.ndarray) -> dict[str, Any]:
    """What is compared of a source; the canonical form is run."""
    form = canonical(model.program, model.constants)
    files = {name for p in model.parameters.values() for _, name in p.names()}
    values = model.pack({n: x for n, x in held.items() if n in files}) | {"ids": held["ids"]} | dict(model.constants)
    values = form.values(values)
    ((found,),) = run_reference(form.program, [[values[n]] for n, _ in form.program.inputs])
    return {
        "repeats": [op.times for s in model.program.steps if (op := as_nested(s.op))],
        "parameters": model.parameter_count,
        "flops": flops(model.program),
        "products": [*contractions(form.program)],
        "text": str(form.program),
        "constants": {n: x.tolist() for n, x in form.constants.items()},
        "difference": float(np.abs(found - wanted).max() / np.abs(wanted).max()),
    }


def compared(kind: str) -> dict[str, Any]:
    """One model from three sources."""
    torch: Any = optional("torch", "torch")
    jax: Any = optional("jax", "jax")
    model, held, wanted, other = of_torch(kind, torch)
    found = {"torch": facts(model, held, wanted), "onnx": facts(other, held, wanted), "jax": facts(*of_jax(kind, jax))}
    first = found["torch"]
    apart = max((float(np.abs(np.subtract(one["constants"][n], x)).max()) for one in found.values()
                 for n, x in first["constants"].items()), default=0.0)  # fmt: skip
    every = [one["flops"] for one in found.values()]
    return {
        "one text": len({one["text"] for one in found.values()}) == 1,
        "products equal": all(one["products"] == first["products"] for one in found.values()),
        "flops apart": max(every) / min(every) - 1,
        "tables apart": apart,
        "sources": {name: {k: one[k] for k in ("repeats", "parameters", "flops", "difference")}
                    for name, one in found.items()},
    }  # fmt: skip


def large() -> dict[str, Any]:
    """What a fresh process says of the large model."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LARGE], capture_output=True, text=True,
                          env=environment, check=True)  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Compare, time, and write the result file."""
    options = arguments("imports", "Imports from three sources, and of a large model.", 3, of="processes").parse_args()
    warnings.filterwarnings("ignore")
    models = {kind: compared(kind) for kind in ("gpt", "llama")}
    rows = [
        [f"{kind} {name}", str(one["repeats"]), one["parameters"], one["flops"], one["difference"]]
        for kind, found in models.items()
        for name, one in found["sources"].items()
    ]
    print(table(("source", "repeats", "parameters", "flops", "largest difference"), rows, "GPT-2 and a Llama"))
    for kind, found in models.items():
        print(kind, {k: v for k, v in found.items() if k != "sources"})
    runs = [large() for _ in range(options.count)]
    rows = [[f"run {k}", r["export"], r["ours"], r["export"] + r["ours"], r["peak GiB"]] for k, r in enumerate(runs)]
    print(table(("175 billion weights", "export s", "ours s", "both s", "peak GiB"), rows, f"targets {TARGETS}"))
    both = spread([r["export"] + r["ours"] for r in runs])
    result = {"sizes": {"gpt": GPT, "llama": LLAMA}, "models": models,
              "large": {"both": both, "ours": spread([r["ours"] for r in runs]), "samples": runs}}  # fmt: skip
    assert all(math.isfinite(one["difference"]) for m in models.values() for one in m["sources"].values())
    write(options.out, record({"count": options.count, "targets": TARGETS, "ids": IDS}, result))


if __name__ == "__main__":
    main()
