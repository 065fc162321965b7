"""What `audit` prints: the verdict, the matrix, a table of the axes, the cause, the cost and the fix; and its JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins

from shardplan.errors import LayoutError
from shardplan.hardware.prices.library import library
from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.launches.audit import WORTH, Audit
from shardplan.launches.causes import uplink_word
from shardplan.launches.fixes import Fix
from shardplan.launches.launch import article, count_units
from shardplan.launches.verdict import Stray
from shardplan.report.fold import WIDTH, fold_lines, fold_python, fold_shell
from shardplan.report.place import traffic_lines
from shardplan.report.text import library_object

MOST_STRAYS = 4  # offending groups printed
MOST_RANKS = 8  # ranks of an offending group printed
MOST_LINES = 12  # lines of a rankfile or hostfile printed
PYTHON = ("torch", "jax", "megatron")  # whose fixes are Python; others' are a shell's
FRAMEWORKS = ("all", "torch", "jax", "megatron", "torchrun", "slurm", "mpi", "nccl-tests")


def audit_text(found: Audit, framework: str = "all", notes: Sequence[str] = ()) -> str:
    """Return an audit as text, with the fix of one framework, or of `all`; `notes` say whose traffic it is.

    Frameworks are torch, jax, megatron, torchrun, slurm, mpi and nccl-tests; raises `LayoutError` for another.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.hardware.topology import Topology
    >>> from shardplan.launches.audit import audit
    >>> topology = Topology.load("gcp-a100x16", nodes=2)
    >>> print(audit_text(audit(range(32), Mesh(data=2, tensor=16), topology)))
    no traffic is given, so nothing is known to be better than this matrix
    verdict  canonical
    matrix   data=[2, 1], tensor=[1, 16]
    on       gcp-a100x16: node=2 x gpu=16, 32 devices
    <BLANKLINE>
    axes    node  gpu  groups a NIC
    data       2    1            16
    tensor     1   16             -
    <BLANKLINE>
    cause    no traffic is given, so nothing is known to be better than this matrix
    """
    if framework not in FRAMEWORKS:
        raise LayoutError(f"fix for {framework!r} is unknown; legal: {', '.join(FRAMEWORKS)}")
    launch, findings = found.launch, found.findings
    lines = [found.answer, *traffic_lines(notes)]
    lines.append(f"verdict  {found.verdict}")
    if findings.matrix is not None:
        rows = zip(launch.mesh.axes, findings.matrix, strict=True)
        lines.append("matrix   " + ", ".join(f"{axis}={list(row)}" for axis, row in rows))
    topology = launch.topology
    lines.append(f"on       {topology.name or 'a topology'}: {topology.describe()}, {topology.size} devices")
    if findings.reason:
        lines.append(f"why      {findings.reason}")
    if found.inside:
        lines.append("inside   " + ", ".join(f"{axis}={level}" for axis, level in found.inside))
    lines += [f"         {_stray(s)}" for s in findings.strays[:MOST_STRAYS]]
    if len(findings.strays) > MOST_STRAYS:
        lines.append(f"         ... and {len(findings.strays) - MOST_STRAYS} more groups")
    lines += ["", *_table(found), ""]
    if found.seconds is not None and found.best_seconds is not None and found.ratio is not None:
        hidden = sum(s.hidden_seconds for s in found.shares)
        beside = f" beside {format_seconds(hidden)} behind compute" if hidden else ""
        then = f"{format_seconds(found.best_seconds)} of the best matrix"
        if found.ratio < 1 - WORTH:
            told = f"less than the {then}"
        elif not found.slower:
            told = "as on the best matrix"
        elif found.best_seconds:
            told = f"{found.ratio:.2f} times the {then}"
        else:
            told = "all of it hidden on the best matrix"
        lines.append(f"cost     {format_seconds(found.seconds)} a step{beside}, {told}")
        if caveat := library(topology.library).caveat:
            lines.append(f"library  {caveat}")
    lines += [f"{'cause' if number == 0 else '':<9}{cause}" for number, cause in enumerate(found.causes)]
    if found.fix is not None:
        best = found.fix.placement
        lines.append(f"best     {best.describe()}")
        for name, text in found.fixes.items():
            if framework in ("all", name):
                lines += ["", f"{name}:", *_short(_fold_fix(name, text))]
    return "\n".join(lines)


def _fold_fix(name: str, text: str) -> str:
    """A fix in indented lines that can be copied, or why there is none, which is prose."""
    prose = text.startswith("not expressible")
    fold = fold_lines if prose else fold_python if name in PYTHON else fold_shell
    return fold(textwrap.indent(text, "  "))


def _short(text: str) -> list[str]:
    """The lines of a fix, a long one cut off."""
    lines = text.rstrip("\n").split("\n")
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[: MOST_LINES - 1], f"  ... {len(lines) - MOST_LINES + 1} more lines (--json has all)"]


def _stray(stray: Stray) -> str:
    """An offending group in a line."""
    ranks = ", ".join(map(str, stray.ranks[:MOST_RANKS])) + (", ..." if len(stray.ranks) > MOST_RANKS else "")
    return f"{', '.join(stray.axes)}: ranks {ranks} span {count_units(stray.spans, stray.level)}, not {stray.expected}"


def _table(found: Audit) -> list[str]:
    """A row for every axis: its factors (or the units it spans), groups and bytes of the busiest link, and seconds."""
    levels = found.launch.topology.levels
    ops = list(dict.fromkeys(s.demand.op for s in found.shares))
    shared = [j for j, level in enumerate(levels[:-1]) if level.size > 1]
    rows: list[list[str]] = []
    calls: list[list[str]] = []
    for row in found.rows:
        cells = [str(a) if a == b else f"{a}-{b}" for a, b in row.spans]
        if found.matrix is not None:
            # The factor of each level: of one axis its row of the matrix.
            factors = [row.spans[0][0]] + [b[0] // a[0] for a, b in zip(row.spans, row.spans[1:], strict=False)]
            cells = [str(x) for x in factors]
        cells += [str(row.per_uplink[j]) if row.per_uplink[j] else "-" for j in shared]
        words: list[str] = []
        own = [share for share in found.shares if share.demand.axes == row.axes]
        if found.shares:
            loads = [sum(share.port_bytes[j] for share in own) for j in shared]
            cells += [format_bytes(n) if n else "-" for n in loads]
        for share in own:
            demand = share.demand
            op = f"{demand.op} " if len(ops) > 1 else ""
            times = "" if demand.count == 1 else f" x {demand.count:g}"
            better = share.seconds > share.best_seconds * (1 + WORTH)
            best = f" (best {format_seconds(share.best_seconds)})" if better else ""
            took = format_seconds(share.seconds + share.hidden_seconds)
            waited = f", {format_seconds(share.seconds)} of it not behind compute" if share.hidden_seconds else ""
            words.append(f"{op}{format_bytes(demand.nbytes)}{times} in {took}{waited}{best}")
        rows.append([", ".join(row.axes), *cells, "; ".join(words)])
        calls.append(words)
    words = [article(uplink_word(levels[j])) for j in shared]
    head = ["axes", *(level.name for level in levels), *(f"groups {word}" for word in words)]
    head += [f"load {word}" for word in words if found.shares]
    head.append("" if not ops else f"a step ({ops[0]})" if len(ops) == 1 else "a step")
    widths = [max(len(r[k]) for r in [head, *rows]) for k in range(len(head))]
    beside = sum(widths) + 2 * (len(widths) - 1) <= WIDTH  # else what a step calls stands below
    out: list[str] = []
    for r in [head, *rows]:
        middle = "".join(f"  {x:>{w}}" for x, w in zip(r[1:-1], widths[1:-1], strict=True))
        out.append(f"{r[0]:<{widths[0]}}{middle}  {r[-1] if beside else ''}".rstrip())
    if not beside:
        out += ["", head[-1]]
        for row, words in zip(rows, calls, strict=True):
            out += [f"{row[0] if k == 0 else '':<{widths[0]}}  {one}" for k, one in enumerate(words)]
    if found.matrix is None:
        out.append(f"{'':<{widths[0]}}  (units of each level that a group spans: there is no matrix)")
    return out


def audit_object(found: Audit) -> dict[str, Any]:
    """Return an audit as an object: its keys are the attribute names."""
    findings, text = found.findings, found.fix
    return {
        "answer": found.answer,
        "verdict": found.verdict,
        "reason": findings.reason or None,
        "matrix": None if findings.matrix is None else [list(row) for row in findings.matrix],
        "mesh": str(found.launch.mesh),
        "placement": None if found.placement is None else found.placement.describe(),
        "topology": found.launch.topology.describe(),
        "topology_name": found.launch.topology.name,
        "topology_size": found.launch.topology.size,
        "library": library_object(found.launch.topology),
        "ids": list(found.launch.ids),
        "strays": to_builtins(findings.strays),
        "rows": to_builtins(found.rows),
        "shares": [
            {
                "axes": list(s.demand.axes),
                "op": s.demand.op,
                "bytes": s.demand.nbytes,
                "count": s.demand.count,
                "seconds": s.seconds,
                "hidden_seconds": s.hidden_seconds,
                "best_seconds": s.best_seconds,
                "algorithm": s.algorithm,
                "uplink_bytes": list(s.uplink_bytes),
                "port_bytes": list(s.port_bytes),
            }
            for s in found.shares
        ],
        "seconds": found.seconds,
        "best": None if found.best is None else [list(row) for row in found.best.matrix],
        "best_seconds": found.best_seconds,
        "ratio": found.ratio if found.ratio is None or math.isfinite(found.ratio) else None,
        "inside": dict(found.inside),
        "cause": found.cause,
        "causes": list(found.causes),
        "fixes": found.fixes,
        "fix": None if text is None else _fix_object(text),
    }


def _fix_object(text: Fix) -> dict[str, Any]:
    names = (
        "torch",
        "jax",
        "megatron",
        "megatron_order",
        "megatron_rankfile",
        "rankfile",
        "srun",
        "torchrun",
        "hostfile",
    )
    nccl_tests = {",".join(axes): split for axes, split in text.nccl_tests}
    return {name: getattr(text, name) for name in names} | {
        "torch_note": text.torch_note or None, "nccl_tests": nccl_tests,
    }  # fmt: skip
