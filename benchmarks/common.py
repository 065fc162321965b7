"""What the benchmark scripts share: the record of the machine, tables, result files, and what is read off a plan."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.problem import CHARGE_PER_ROUND, Problem

from benchmarks import suites
from shardplan.core.accounting import account
from shardplan.core.mesh import Mesh
from shardplan.core.ops import Exchange, Op, Permute, Slice
from shardplan.core.pattern import Groups, Local, Messages, Pattern
from shardplan.core.program import Program
from shardplan.core.tensor import TensorType
from shardplan.plans.nominal import longest_path
from shardplan.plans.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("numpy", "jax", "jaxlib", "torch")
FAMILIES = ("identity", "local", "typed", "cutting permute", "group exchange", "direct exchange", "mixed")


# The record that every result file opens with.


def machine() -> dict[str, Any]:
    """The processor, the cores this process may use, and the kernel."""
    kernel = f"{platform.system()} {platform.release()}"
    return {"cpu": _cpu_model(), "cores": _cores(), "kernel": kernel, "architecture": platform.machine()}


def _cpu_model() -> str:
    """The processor as the machine calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that are installed; nothing is imported for it."""
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def commit() -> str:
    """The commit of the checkout, marked where files differ from it; `unknown` outside git."""
    try:
        head = _git("rev-parse", "HEAD")
        return f"{head} with changes" if _git("status", "--porcelain", "--", "src", "benchmarks") else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    """What git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def record(parameters: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """A result with the machine, the versions, the date, the commit and the parameters before it."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = {"date": now, "commit": commit(), "machine": machine(), "versions": versions(), "parameters": parameters}
    return head | result


def write(path: Path, result: dict[str, Any], quiet: bool = False) -> None:
    """Write a result as JSON, lists of rows with one row a line; an interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    builder = path.with_suffix(".part")
    builder.write_text(_json(result, 0) + "\n", encoding="utf-8")
    builder.replace(path)
    if quiet:
        return
    print(f"\nwritten: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}")


def _json(value: Any, depth: int) -> str:
    """A value as JSON that is read and compared by people: a row of a table a line, what is short on one."""
    flat = json.dumps(_plain(value), ensure_ascii=False)
    if depth > 3 or len(flat) < 100 or not isinstance(value, (dict, list)):
        return flat
    pad = "  " * (depth + 1)
    if isinstance(value, dict):
        body = [f"{pad}{json.dumps(str(k), ensure_ascii=False)}: {_json(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(body) + "\n" + "  " * depth + "}"
    rows = isinstance(value[0], dict)
    body = [pad + (json.dumps(_plain(v), ensure_ascii=False) if rows else _json(v, depth + 1)) for v in value]
    return "[\n" + ",\n".join(body) + "\n" + "  " * depth + "]"


def _plain(value: Any) -> Any:
    """JSON has no infinity and knows no numpy: null, and Python numbers of at most 6 digits after the point."""
    match value:
        case dict():
            return {str(k): _plain(v) for k, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
        case np.generic():
            return _plain(value.item())
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case _:
            return value


def arguments(name: str, about: str, count: int, **more: Any) -> argparse.ArgumentParser:
    """The options that all scripts take."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument("--count", type=int, default=count, help=more.get("of", "how many") + " (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="the result file")
    return parser


# Numbers and tables.


def geomean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 90th percentile and maximum, and of how many."""
    if not values:
        return {"count": 0, "median": math.nan, "p90": math.nan, "max": math.nan}
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    return {"count": len(ordered), "median": statistics.median(ordered), "p90": p90, "max": ordered[-1]}


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> str:
    """A table in text: the first column to the left, the others to the right."""
    cells = [list(map(str, headers)), *([_cell(x) for x in row] for row in rows)]
    widths = [max(len(row[k]) for row in cells) for k in range(len(headers))]
    lines = ["  ".join(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
             for row in cells]  # fmt: skip
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join([f"\n{title}"] * bool(title) + [line.rstrip() for line in lines])


def _cell(x: Any) -> str:
    if isinstance(x, float):
        return "-" if math.isnan(x) else f"{x:.4g}" if abs(x) < 1e6 else f"{x:.3e}"
    return "-" if x is None else str(x)


class Progress:
    """A line on standard error now and then."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0

    def add(self, count: int = 1, note: str = "") -> None:
        """Count, and say so at every twentieth part."""
        before, self.done = self.done, self.done + count
        if before * 20 // self.total != self.done * 20 // self.total or self.done == self.total:
            print(f"{self.what}: {self.done} of {self.total} {note}".rstrip(), file=sys.stderr, flush=True)


# What a plan does.


@dataclass(frozen=True, slots=True)
class Facts:
    """A plan in numbers, as the peers' `Moves` give them; bytes of the worst device."""

    received: int  # over all steps
    charged: float  # the larger of sent and received of each step, on the longest path, and the charge of the rounds
    rounds: int  # those of every chunk
    peers: int  # devices that one device hears from, over all steps
    largest: int  # largest local tensor
    family: str
    ops: tuple[str, ...]
    status: str

    def to_json(self) -> dict[str, Any]:
        """The facts as plain values."""
        return asdict(self)


def facts(plan: Plan) -> Facts:
    """Read the numbers off a plan."""
    program, certificate = plan.program, plan.certificate
    books = account(program)
    return Facts(
        received=int(books.received.max(initial=0)),
        charged=charged(plan),
        rounds=sum(books.latencies),
        peers=distinct_peers(program),
        largest=max(t.local_bytes() for t in program.types.values()),
        family=family(program),
        ops=tuple(described(step.op, *program.step_types(step)) for step in program.steps),
        status=certificate.status,
    )


def charged(plan: Plan) -> float:
    """The planner's objective without a topology, on the longest path; a chunk is a round."""
    books, charge = account(plan.program), CHARGE_PER_ROUND * plan.certificate.bound_bytes
    lengths = [moved + charge * n for moved, n in zip(books.step_moved, books.latencies, strict=True)]
    return longest_path(plan.program, lengths)


def distinct_peers(program: Program) -> int:
    """The devices that the worst device hears from over all steps; of a group, all other members."""
    pairs = [_pairs(step.op.pattern(*program.step_types(step)[0])) for step in program.steps]
    merged = np.concatenate([p for p in pairs if len(p)] or [np.zeros((0, 2), dtype=np.int64)])
    if not len(merged):
        return 0
    return int(np.bincount(np.unique(merged, axis=0)[:, 1]).max())


def _pairs(pattern: Pattern) -> np.ndarray:
    """(sender, receiver) of a communication, int [n, 2]."""
    match pattern:
        case Local():
            return np.zeros((0, 2), dtype=np.int64)
        case Messages():
            return np.stack([pattern.sender, pattern.receiver], axis=1)[pattern.nbytes > 0]
        case Groups():
            k = pattern.members.shape[1]
            at, to = np.nonzero(~np.eye(k, dtype=bool))
            return np.stack([pattern.members[:, at].ravel(), pattern.members[:, to].ravel()], axis=1)


def described(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType]) -> str:
    """An op in a few words, for the rows of a result."""
    mesh = operands[0].mesh
    axes: tuple[str, ...] = getattr(op, "axes", ())
    if isinstance(op, Permute):
        return "cutting permute" if operands[0].local_bytes() != results[0].local_bytes() else "permute"
    if isinstance(op, Exchange):
        q = group_size(op, mesh)
        return f"exchange of all {q}" if q == mesh.size else f"exchange in groups of {q}"
    return f"{op.name} {','.join(axes)}" if axes else op.name


def group_size(op: Exchange, mesh: Mesh) -> int:
    """The devices of a group of an exchange."""
    return math.prod(mesh.span(a).size for a in op.axes) if op.axes else mesh.size


def family(program: Program) -> str:
    """The family of candidates that a program on one mesh comes from, by its ops.

    `typed` are slices, gathers, all-to-alls, reductions and permutes of whole tiles; `cutting permute`, `group
    exchange` (groups of at most half the mesh) and `direct exchange` (larger groups) stand alone or beside slices;
    what combines one of them with a move of another family is `mixed`.
    """
    if not program.steps:
        return "identity"
    kinds = {_kind(step.op, *program.step_types(step)) for step in program.steps}
    moving = kinds - {"local"}
    if not moving:
        return "local"
    return moving.pop() if len(moving) == 1 else "mixed"


def _kind(op: Op, operands: Sequence[TensorType], results: Sequence[TensorType]) -> str:
    """The row of the result that an op counts for."""
    match op:
        case Slice():
            return "local"
        case Exchange():
            mesh = operands[0].mesh
            return "group exchange" if 2 * group_size(op, mesh) <= mesh.size else "direct exchange"
        case Permute():
            return "cutting permute" if operands[0].local_bytes() != results[0].local_bytes() else "typed"
        case _:
            return "typed"


def to_peer(s: TensorType, t: TensorType) -> Problem | None:
    """The problem as the peers take it; None for what they cannot say (partial, other meshes).

    Sub-axes are Shardy's alone.
    """
    mesh = s.mesh
    plain = not (s.layout.partial or t.layout.partial or s.layout.root or t.layout.root)
    if not (plain and mesh == t.mesh and mesh.devices == tuple(range(mesh.size))):
        return None

    ends = (tuple(_parts(mesh, dim) for dim in x.layout.dims) for x in (s, t))
    return Problem(tuple(zip(mesh.axes, mesh.sizes, strict=True)), s.shape, s.itemsize, *ends)


def _parts(mesh: Mesh, names: Sequence[str]) -> tuple[str, ...]:
    """Axes as the peers write them: a run of sub-axes is one part, such as `x:(2)4`."""
    out: list[str] = []
    end = None
    for name in names:
        span, axis = mesh.span(name), mesh.span(name.split(".")[0])
        major, size = axis.size * axis.stride // (span.size * span.stride), span.size
        if end == (axis.name, span.size * span.stride):
            major, size = (int(x) for x in out.pop().partition("(")[2].split(")"))
            size *= span.size
        out.append(axis.name if size == axis.size else f"{axis.name}:({major}){size}")
        end = axis.name, span.stride
    return tuple(out)


def listed(ends: TensorType | Sequence[TensorType]) -> list[TensorType]:
    """One end of a request as a list: of one type, or of a batch."""
    return [ends] if isinstance(ends, TensorType) else list(ends)


def single(cases: Iterable[suites.Case]) -> Iterator[tuple[TensorType, TensorType]]:
    """Yield the problems that are no batches and have no further keywords, in their order."""
    for s, t, keywords in cases:
        if isinstance(s, TensorType) and isinstance(t, TensorType) and not keywords:
            yield s, t


def told(s: TensorType | Sequence[TensorType], t: TensorType | Sequence[TensorType], **keywords: Any) -> str:
    """A request in text, which `TensorType.parse` and `Mesh.parse` read back."""
    if isinstance(s, TensorType) and isinstance(t, TensorType):
        meshes = str(s.mesh) if s.mesh == t.mesh else f"{s.mesh} -> {t.mesh}"
        text = f"{meshes}: {s} -> {t}"
    else:
        pairs = list(zip(listed(s), listed(t), strict=True))
        text = f"{len(pairs)} tensors: " + "; ".join(told(a, b) for a, b in pairs[:3]) + (" ..." if pairs[3:] else "")
    return text + "".join(f", {k}={v}" for k, v in keywords.items())


def use_tests(name: str) -> Any:
    """Import a module of `tests/`: the oracles are written there once, independent of the package."""
    import importlib

    folder = str(ROOT / "tests")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `work` and the seconds it took."""
    import time

    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started
