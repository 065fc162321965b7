"""Every module, function and graph of `import_modules`, `import_functions` and `import_stock`, imported and run.

`python -m benchmarks.import_sweep [--count 0] [--kinds torch jax onnx stock]`: `--count` bounds the cases of a kind, 0
is all. A case is *equal* where the imported program computes what the source computes (to 1e-9 in f64; to 1e-6 where
the source itself has floats of 32 bits or fewer inside; of ONNX, in f32, to 2e-6), *refused* where one error of ours
says why not, *wrong* where values differ, and *raw* where anything else was raised. Wrong and raw are to be none. A
case that the framework itself does not export or run is counted apart. Stock models need `transformers`, else they are
left out.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from benchmarks.common import ROOT, arguments, record, table, write

from shardplan.core.reference import run_reference
from shardplan.errors import ShardplanError, line
from shardplan.interop.importers import load
from shardplan.strategy import Model

KINDS = ("torch", "jax", "onnx", "stock")
EXACT, INSIDE, SINGLE = 1e-9, 1e-6, 2e-6


class Source(NamedTuple):
    """What is imported, the arrays of its inputs and weights by name, what it computes, and how close that is."""

    value: Any
    held: Mapping[str, np.ndarray]
    wanted: Sequence[np.ndarray]
    close: float


Make = Callable[[], Source]


def of_torch(make: Callable[[], tuple[Any, Any]]) -> Source:
    """A module, exported in f64."""
    import torch

    torch.manual_seed(0)
    module, inputs = make()
    module = module.double().eval()
    export = torch.export.export(module, inputs)
    with torch.no_grad():
        wanted = [x.numpy() for x in _leaves(module(*inputs))]
    names = [s.arg.name for s in export.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    held = {n: p.detach().numpy() for n, p in module.named_parameters()} | {
        n: x.numpy() for n, x in zip(names, inputs, strict=True)
    }
    kinds = {f.dtype for n in export.graph.nodes for f in _leaves(n.meta.get("val")) if f.dtype.is_floating_point}
    return Source(export, held, wanted, EXACT if kinds <= {torch.float64} else INSIDE)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in _leaves(v)]
    if isinstance(value, (list, tuple)):
        return [x for v in value for x in _leaves(v)]
    return [value] if hasattr(value, "dtype") else []


def of_jax(function: Callable[..., Any], inputs: tuple[np.ndarray, ...]) -> Source:
    """A function's jaxpr."""
    import jax

    jaxpr = jax.make_jaxpr(function)(*inputs)
    wanted = [np.asarray(x) for x in jax.tree.leaves(function(*map(jax.numpy.asarray, inputs)))]
    said = [*map(str, jaxpr.jaxpr.debug_info.arg_names)]
    narrow = any(kind in str(jaxpr) for kind in (":f32[", ":f16[", ":bf16[", ":c64["))
    return Source(jaxpr, dict(zip(said, inputs, strict=True)), wanted, INSIDE if narrow else EXACT)


def of_onnx(model: Any, inputs: Mapping[str, np.ndarray]) -> Source:
    """A graph, beside the reference of ONNX."""
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    wanted = [np.asarray(x) for x in ReferenceEvaluator(model).run(None, dict(inputs))]
    weights = {x.name: numpy_helper.to_array(x) for x in model.graph.initializer}
    return Source(model, weights | dict(inputs), wanted, SINGLE)


def cases(kind: str) -> Iterator[tuple[str, Make]]:
    """The cases of a kind."""
    if kind == "torch":
        from benchmarks.import_modules import modules

        for name, make in modules().items():
            yield name, lambda make=make: of_torch(make)
    elif kind == "jax":
        import jax
        from benchmarks.import_functions import functions

        jax.config.update("jax_enable_x64", True)
        for name, (function, inputs) in functions().items():
            yield name, lambda f=function, i=inputs: of_jax(f, i)
    elif kind == "onnx":
        from benchmarks.import_functions import graphs

        for name, (model, inputs) in graphs().items():
            yield name, lambda m=model, i=inputs: of_onnx(m, i)
    elif find_spec("transformers"):
        from benchmarks.import_stock import stock

        for attention in ("sdpa", "eager"):
            for name, make in stock(attention).items():
                yield f"{name}, {attention}", lambda make=make: of_torch(make)


def differs(model: Model, source: Source) -> str:
    """In what the imported program differs from the source; empty where it does not."""
    files = {file for p in model.parameters.values() for _, file in p.names()}
    values = model.pack({n: x for n, x in source.held.items() if n in files}) | dict(model.constants)
    given = {"".join(c if c.isalnum() or c in "_." else "" for c in n): x for n, x in source.held.items()}
    with np.errstate(all="ignore"):
        found = run_reference(model.program, [[{**given, **values}[n]] for n, _ in model.program.inputs])
    if len(found) != len(source.wanted):
        return f"{len(found)} results, not {len(source.wanted)}"
    for (mine,), x in zip(found, source.wanted, strict=True):
        if mine.shape != x.shape or mine.dtype != x.dtype:
            return f"{mine.dtype}{list(mine.shape)}, not {x.dtype}{list(x.shape)}"
        if x.dtype.kind not in "fc":
            if not np.array_equal(mine, x):
                return f"{(mine != x).mean():.0%} of the elements"
        elif not np.array_equal(np.isfinite(mine), np.isfinite(x)):
            return "what is finite"
        else:
            good = np.isfinite(x)
            apart = float(np.abs(mine[good] - x[good]).max(initial=0))
            if apart > source.close * max(1.0, float(np.abs(x[good]).max(initial=0))):
                return f"{apart:.3g}"
    return ""


def outcome(make: Make) -> tuple[str, str]:
    """What came of a case, and what is said of it."""
    try:
        source = make()
    except Exception as error:
        return "not exported", f"{type(error).__name__}: {line(error)}"
    try:
        said = differs(load(source.value), source)
    except ShardplanError as error:
        return "refused", line(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {line(error)}"
    return ("wrong" if said else "equal"), said


def main() -> None:
    """Import all cases, print those that are wrong or raw, and write the result file."""
    parser = arguments("import_sweep", "Modules, functions and graphs imported and run.", 0, of="cases of a kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", nargs="+", default=[], help="names of cases, told in full")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    counts: dict[str, dict[str, int]] = {}
    rows = list[dict[str, str]]()
    for kind in options.kinds:
        found = Counter[str]()
        for number, (name, make) in enumerate(cases(kind)):
            if (options.count and number >= options.count) or (options.only and name not in options.only):
                continue
            came, said = outcome(make)
            found[came] += 1
            rows.append({"kind": kind, "case": name, "outcome": came, "said": said.replace(f"{ROOT}/", "")[:200]})
            if came in ("raw", "wrong") or options.only:
                print(f"{kind}: {name}: {came}: {said}")
        counts[kind] = dict(found)
    order = ("equal", "refused", "wrong", "raw", "not exported")
    cells = [[kind, *(one.get(o, 0) for o in order)] for kind, one in counts.items()]
    print(table(("kind", *order), cells, "imports"))
    if not options.only:
        beside = {n: version(n) if find_spec(n) else "not installed" for n in ("transformers", "onnx")}
        parameters = {"close": EXACT, "with f32 inside": INSIDE, "in f32": SINGLE, "count": options.count, **beside}
        write(options.out, record(parameters, {"counts": counts, "cases": rows}))
    if any(one.get("wrong", 0) + one.get("raw", 0) for one in counts.values()):
        sys.exit("import_sweep: cases are wrong or raw")


if __name__ == "__main__":
    main()
