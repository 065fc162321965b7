"""25 stock models of transformers and 29 plain torch modules as they are: loaded, run on one device and on four.

`python -m benchmarks.stock_models [--count 0] [--only CASE ...] [--more KIND ...]`: each is taken by
`sp.load(module, example, names=...)` without a change, partitioned under `Strategy(tensor=2, data=2)`, and run on the
reference; every floating weight is random, norms and biases too. Outputs are compared with what torch computes, in
f64: to 1e-9; where the source itself rounds to f32 inside to 1e-6, or to twice what torch's own results are from those
without that rounding, if that is more. Such a source is compared a second time with
torch's f32 read as f64 wherever its code names it, to 1e-9: so no error hides below a rounding. Beside each stand the
weights that no axis of `tensor` cuts though they have two dims and more, and the worst device's share of the
operations. What is refused is refused in one line; anything else that is raised is `raw`, and is to be none.
`--more` takes further kinds of models, which nobody had tried when the code was done.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.common import ROOT, arguments, record, table, write
from benchmarks.import_stock import CONFIGS, MORE, model_of
from benchmarks.stock_modules import Called, modules
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

import shardplan as sp
from shardplan.core.ops.compute import computing
from shardplan.core.program import Program
from shardplan.core.walk import program_leaves, programs
from shardplan.errors import ShardplanError, line

EXACT, INSIDE = 1e-9, 1e-6
STOCK = (
    "gpt2", "gpt_neox", "gpt_oss", "bloom", "falcon", "opt", "llama", "mistral", "mixtral", "qwen2", "qwen3",
    "qwen3_moe", "gemma2", "gemma3_text", "phi3", "deepseek_v2", "deepseek_v3", "olmo2", "glm4", "stablelm", "bert",
    "roberta", "t5", "vit", "mamba2",
)  # fmt: skip
ONE = {"global_batch": 4, "microbatch": 4}
FOUR = {"tensor": 2, "data": 2, "global_batch": 4, "microbatch": 2}
Make = Callable[[], Called]


class Ran(NamedTuple):
    """What came of a strategy: how far results are from torch's, beside the largest of them; or why it was refused."""

    outcome: str  # equal, wrong, refused, raw
    apart: float | None
    said: str


def stock_case(kind: str) -> Called:
    """A stock model, and a call of it that keeps no cache."""
    head, _ = CONFIGS[kind]
    ids = torch.randint(3, 67, (4, 7), generator=torch.Generator().manual_seed(1))
    if head == "ImageClassification":
        image = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return Called(model_of(kind), {"pixel_values": image}, {"pixel_values": ("batch", None, None, None)})
    example: dict[str, Any] = {"input_ids": ids}
    if head == "Seq2SeqLM":
        example["decoder_input_ids"] = ids.flip(1)
    names: dict[str, tuple[str | None, ...]] = dict.fromkeys(example, ("batch", "sequence"))
    return Called(model_of(kind), example | ({} if head == "MaskedLM" else {"use_cache": False}), names)


def cases(more: list[str]) -> Iterator[tuple[str, str, Make]]:
    """Groups, names, and what makes the cases."""
    for kind in STOCK if find_spec("transformers") else ():
        yield "stock", kind, lambda kind=kind: stock_case(kind)
    for name in modules():
        yield "modules", name, lambda name=name: modules()[name]()
    for kind in more if find_spec("transformers") else ():
        yield "chosen afterwards", kind, lambda kind=kind: stock_case(kind)


def with_random_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Every floating weight random and in f64, so that none is without effect."""
    module, noise = module.double().eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=noise, dtype=p.dtype) * (0.3 if p.ndim > 1 else 0.5))
    return module


@contextlib.contextmanager
def widened() -> Generator[None]:
    """Torch's f32 is f64, by every name under which a model asks for it."""
    held = torch.float32, torch.float, torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64  # type: ignore[misc]
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.set_default_dtype(held[0])
        torch.float32, torch.float, torch.Tensor.float = held  # type: ignore[misc, method-assign]


def leaves(values: Any) -> list[Any]:
    """The tensors of a result, in order."""
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def run(called: Called) -> dict[str, Any]:
    """Load a module, and run it on one device and on four."""
    with torch.no_grad():
        example = called.example
        made = called.module(**example) if isinstance(example, dict) else called.module(*example)
    wanted = [x.numpy() for x in leaves(made)]
    try:
        model = sp.load(called.module, example, names=called.names)
    except ShardplanError as error:
        return {"loads": "refused", "said": line(error)}
    except Exception as error:
        return {"loads": "raw", "said": f"{type(error).__name__}: {line(error)}"}
    files = {file for p in model.parameters.values() for _, file in p.names()}
    tensors = {**dict(called.module.named_parameters()), **dict(called.module.named_buffers())}
    held = model.pack({n: x.detach().numpy() for n, x in tensors.items() if n in files}) | dict(model.constants)
    given = leaves(example)
    names = [n for n, _ in model.program.inputs if n not in held]
    held |= {n: x.numpy() for n, x in zip(names, given, strict=True)}
    inside = any(op.dtype == "f32" for one in programs(model.program) for op in one.types.values())
    one, _ = try_strategy(model, ONE, held, wanted, inside)
    four, job = try_strategy(model, FOUR, held, wanted, inside)
    row: dict[str, Any] = {"loads": "yes", "one": one.outcome, "four": four.outcome, "f32 inside": inside}
    row |= {"apart on one": one.apart, "apart on four": four.apart, "said": one.said or four.said}
    row["wanted"] = wanted
    if job is not None:
        cut = {n for n, t in job.state.items() if any("tensor" in axes for axes in t.layout.dims)}
        large = [n for n, p in model.parameters.items() if sum(d != "layer" for d, _ in p.dims) > 1]
        row |= {"weights": len(large), "left whole": [n for n in large if n not in cut]}
        counts = [flops(job.programs[key]) * times for key, times in job.runs.items()]
        row["share of operations"] = sum(counts) / flops(model.program)
    return row


def flops(program: Program) -> float:
    """The operations of the worst device."""
    return sum(n * op.flops(*types) for n, leaf, types in program_leaves(program) if (op := computing(leaf)))


def try_strategy(
    model: sp.Model, fields: Mapping[str, Any], held: Mapping[str, Any], wanted: list[np.ndarray], inside: bool
) -> tuple[Ran, Any]:
    """Partition and run a model, and compare."""
    job = None
    try:
        job = sp.partition(model, sp.Strategy(**fields))
        with np.errstate(all="ignore"):
            found = sp.run(job, dict(held))
    except ShardplanError as error:
        return Ran("refused", None, line(error)), job
    except Exception as error:
        return Ran("raw", None, f"{type(error).__name__}: {line(error)}"), job
    results = [found[n] for n in model.program.outputs]
    if [x.shape for x in results] != [x.shape for x in wanted]:
        return Ran("wrong", None, f"shapes {[x.shape for x in results]}, not {[x.shape for x in wanted]}"), job
    worst = distance(results, wanted)
    return Ran("equal" if worst <= (INSIDE if inside else EXACT) else "wrong", worst, ""), job


def distance(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """How far results are apart, beside the largest element, or 1."""
    return max((float(np.abs(a - b).max(initial=0)) / max(1.0, float(np.abs(b).max(initial=0)))
                for a, b in zip(found, wanted, strict=True)), default=0.0)  # fmt: skip


def outcome(make: Make) -> dict[str, Any]:
    """What came of a case, as it is and, where it rounds to f32 inside, widened."""
    try:
        called = make()
        row = run(called._replace(module=with_random_weights(called.module)))
        if not row.get("f32 inside"):
            row.pop("wanted", None)
            return row
        with widened():
            called = make()
            wide = run(called._replace(module=with_random_weights(called.module)))
    except Exception as error:
        return {"loads": "not run by torch", "said": f"{type(error).__name__}: {line(error)}"}
    row["widened on four"] = wide.get("apart on four")
    results, exact = row.pop("wanted", []), wide.pop("wanted", [])
    row["rounding"] = distance(results, exact)
    for at in ("one", "four"):  # no farther than twice what torch itself rounds
        if (
            row.get(at) == "wrong"
            and row[f"apart on {at}"] is not None
            and row[f"apart on {at}"] <= 2 * row["rounding"]
        ):
            row[at] = "equal"
    if wide["loads"] != "yes" or wide["f32 inside"] or wide["one"] != "equal" or wide["four"] != "equal":
        row |= {"one": wide.get("one", "wrong"), "four": wide.get("four", "wrong"), "said": f"widened: {wide['said']}"}
    return row


def main() -> None:
    """Try all cases, print what came of each, and write the result file."""
    parser = arguments(
        "stock_models", "Stock models and plain modules as they are.", 0, of="cases of a group, 0 is all"
    )
    parser.add_argument("--only", nargs="+", default=[], help="names of cases, told in full")
    parser.add_argument("--more", nargs="*", default=list(MORE), help="further kinds of models")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    rows = list[dict[str, Any]]()
    done = dict[str, int]()
    for group, name, make in cases(options.more):
        done[group] = done.get(group, 0) + 1
        if (options.count and done[group] > options.count) or (options.only and name not in options.only):
            continue
        row = {"group": group, "case": name, **outcome(make)}
        row["said"] = row["said"].replace(f"{ROOT}/", "")[: None if options.only else 300]
        rows.append(row)
        print(
            f"{name}: {row}" if options.only else f"{name}: {row.get('four', row['loads'])} {row['said']}", flush=True
        )
    counts = {
        group: summary([r for r in rows if r["group"] == group]) for group in dict.fromkeys(r["group"] for r in rows)
    }
    heads = ("of", "load", "equal on one", "equal on four", "refused", "wrong", "raw")
    print(table(("", *heads), [[g, *(c[h] for h in heads)] for g, c in counts.items()], "models as they are"))
    if not options.only:
        parameters = {"strategy": FOUR, "close": EXACT, "with f32 inside": INSIDE, "count": options.count}
        kept = {"transformers": version("transformers") if find_spec("transformers") else "not installed"}
        write(options.out, record(parameters | kept, {"counts": counts, "cases": rows}))
    if any(c["wrong"] or c["raw"] for c in counts.values()):
        sys.exit("stock_models: cases are wrong or raw")


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Counts of a group."""
    ends = [{str(r.get(k)) for k in ("loads", "one", "four")} for r in rows]
    return {
        "of": len(rows),
        "load": sum(r["loads"] == "yes" for r in rows),
        "equal on one": sum(r.get("one") == "equal" for r in rows),
        "equal on four": sum(r.get("four") == "equal" for r in rows),
        **{what: sum(what in said for said in ends) for what in ("refused", "wrong", "raw")},
    }


if __name__ == "__main__":
    main()
