"""Shipped tables compared with what frameworks' own loaders make of a checkpoint, at several degrees, on the CPU.

`python -m benchmarks.weights_loaders`: torchtitan, peft, Megatron-Core, vLLM and SGLang, each where it can be imported.
A tiny model whose elements carry their index is given to the framework's own loader on every rank of a mesh of forked
gloo processes; what the rank's `named_parameters()` and `named_buffers()` then are is compared with the table, element
by element. A table that no loader was asked about says why. With vLLM, `examples/vllm_engine.py` is run as well: live
weights to the models of real workers, bit for bit what `load_weights` makes. `benchmarks/README.md` says how the
environment is made: none of these frameworks is needed by the project, and most of them want other versions of torch
than its tests.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType
from typing import Any

from benchmarks.common import arguments, record, table, write
from benchmarks.loaders.cases import LoaderCase, Named

from shardplan.errors import LayoutError
from shardplan.movement.weights.probe import probe
from shardplan.movement.weights.table import shipped_tables
from shardplan.movement.weights.weights import Weights

# The module of `benchmarks.loaders`, and the distribution that it needs.
FRAMEWORKS = {
    "titan": "torchtitan", "peft": "peft", "megatron": "megatron-core", "vllm": "vllm", "sglang": "sglang",
}  # fmt: skip
COLUMNS = ("table", "degrees", "parameters", "elements", "differ", "found")
# What the names of their tables begin with.
HEADS = {
    "titan": "torchtitan",
    "peft": ("peft", "fsdp2-peft"),
    "megatron": "megatron",
    "vllm": "vllm",
    "sglang": "sglang",
}


def asked(module: ModuleType, case: LoaderCase) -> dict[str, Any]:
    """Probe one table, as a row."""
    row: dict[str, Any] = {"table": case.target, "from": case.source, "loader": case.says}
    row |= {"degrees": " ".join(f"{k}={v}" for k, v in case.degrees.items()) or "one rank"}
    row |= {key: said for key in ("renamed", "fault") if (said := getattr(case, key))}
    sizes = dict(case.sizes)
    source = Weights.load(case.source, sizes, dtype="f32", **case.given)
    target = Weights.load(case.target, sizes, dtype="f32", **case.degrees)

    def load(named: Named) -> dict[int, Named]:
        return module.loaded(case, named)

    try:
        found = probe(source, load, target)
    except (LayoutError, RuntimeError) as error:
        return row | {"found": f"not probed, it raised: {str(error).strip().splitlines()[-1][:300]}"}
    head = str(found.differences[0]) if found.differences else "equal"
    return row | {
        "parameters": found.parameters, "elements": found.elements, "differ": len(found.differences), "found": head
    }  # fmt: skip


def main() -> None:
    """Ask every framework that is here, print a line a case, and write the result."""
    parser = arguments("weights_loaders", "Shipped tables beside frameworks' own loaders.", 1, of="runs")
    parser.add_argument("--of", nargs="+", choices=tuple(FRAMEWORKS), default=tuple(FRAMEWORKS), help="which of them")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    left: dict[str, str] = {}
    installed: dict[str, str] = {}
    for name in given.of:
        try:
            module = importlib.import_module(f"benchmarks.loaders.{name}")
        except ImportError as error:
            left |= {t: f"not probed: {error}" for t in shipped_tables() if t.startswith(HEADS[name])}
            continue
        installed[FRAMEWORKS[name]] = importlib.metadata.version(FRAMEWORKS[name])
        left |= module.LEFT
        for case in module.CASES:
            rows.append(asked(module, case))
            print(table(COLUMNS, [[str(rows[-1].get(key, "")) for key in COLUMNS]]).splitlines()[-1], flush=True)
    if not installed:
        parser.error(
            f"none of {', '.join(FRAMEWORKS.values())} can be imported here; benchmarks/README.md says what is needed"
        )
    probed = {row["table"] for row in rows} | {row["from"] for row in rows}
    rest = [
        {"table": n, "found": left.get(n, "not probed: no loader here was asked about it")}
        for n in shipped_tables()
        if n not in probed and any(n.startswith(HEADS[name]) for name in given.of)
    ]
    for row in rest:
        print(f"{row['table']}: {row['found']}")
    live = []
    if "vllm" in installed:
        module = importlib.import_module("benchmarks.loaders.vllm_live")
        live = [module.refitted(case) for case in module.CASES]
        print("vLLM's engine:", *(f"{row['table']} {row['degrees']} {row['found']}" for row in live), sep="\n  ")
    write(given.out, record({"installed": installed}, {"rows": rows, "not probed": rest, "vllm's engine": live}))


if __name__ == "__main__":
    main()
