"""What `refit`, `reshard`, `diff` and `derive` print, and their JSON objects."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardplan.hardware.units import format_bytes, format_seconds
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights
from shardplan.plans.pricing import network_name
from shardplan.report.fold import WIDTH

SHOWN = 40  # parameters printed, and files


def moves_rows(plan: RefitPlan) -> list[dict[str, Any]]:
    """Return for every pair of stored parameters its tensor, both names, both types, and the bytes that arrive."""
    rows: list[dict[str, Any]] = []
    for number, move in enumerate(plan.moves):
        source, target = plan.source.families[move.source_family], plan.target.families[move.target_family]
        rows.append(
            {
                "tensor": move.tensor,
                "source": source.entry.name,
                "source_type": _type(source.dtype, str(source.entry.form)),
                "target": target.entry.name,
                "target_type": _type(target.dtype, str(target.entry.form)),
                "bytes": int(move.elements.sum()) * plan.itemsizes(number)[1],
            }
        )
    return rows


def _type(dtype: str, form: str) -> str:
    return f"{dtype}[{form}]"


def moves_text(plan: RefitPlan) -> list[str]:
    """Return lines for every stored parameter of the target: its name and bytes, and below them what it comes from."""
    every = moves_rows(plan)
    by_target: dict[str, list[dict[str, Any]]] = {}
    for row in every:
        by_target.setdefault(row["target"], []).append(row)
    rows = [
        [
            name,
            format_bytes(sum(r["bytes"] for r in found)),
            " + ".join(dict.fromkeys(r["source_type"] for r in found)),
            found[0]["target_type"],
        ]
        for name, found in by_target.items()
    ]
    lines: list[str] = []
    for name, size, of, own in rows[:SHOWN]:
        room = WIDTH - 2 - len(name)  # a long name has its bytes below it
        lines += [f"  {name}{size.rjust(room)}"] if room > len(size) + 1 else [f"  {name}", size.rjust(WIDTH)]
        whole = _wrap_lines(f"{of} -> {own}", "      ")
        lines += (
            whole if len(whole) == 1 else [*_wrap_lines(of, "      "), *_wrap_lines(f"-> {own}", "         ", "      ")]
        )
    return lines + ([f"  ... and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])


def _wrap_lines(text: str, indent: str = " " * 12, first: str | None = None) -> list[str]:
    """A text in lines of at most `WIDTH` columns, cut at blanks; `first` stands before the first line."""
    start = indent if first is None else first.ljust(len(indent))
    return textwrap.wrap(
        text, WIDTH, initial_indent=start, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def dropped_text(plan: RefitPlan) -> list[str]:
    """Return a line of what the target does not take, where there is any."""
    return _wrap_lines(", ".join(plan.dropped), first="dropped") if plan.dropped else []


def side_text(weights: Weights) -> str:
    """Return a side as a few words: its table, its degrees above 1, its devices and its dtype."""
    degrees = ", ".join(f"{a}={n}" for a, n in weights.degrees.items() if n > 1)
    count = len(weights.devices)
    where = f"{count} device{'s' if count > 1 else ''}"
    return f"{weights.table.name or 'a table'} {weights.dtype}, {where}{f' ({degrees})' if degrees else ''}"


def refit_text(plan: RefitPlan) -> str:
    """Return a refit's plan as text: both sides, every stored parameter, what ranks send and receive, seconds."""
    _, _, size = plan.traffic
    total = sum(row["bytes"] for row in moves_rows(plan))
    limit = "none" if plan.memory_limit is None else format_bytes(plan.memory_limit)
    return "\n".join(
        [
            f"refit       {plan.hash}",
            *_wrap_lines(side_text(plan.source), first="source"),
            *_wrap_lines(side_text(plan.target), first="target"),
            f"parameters  {format_bytes(total)} at the target",
            *moves_text(plan),
            *dropped_text(plan),
            *_wrap_lines(
                f"{format_bytes(int(size.sum()))} in {len(size)} pairs of ranks; at most "
                f"{format_bytes(max(plan.sent_bytes, default=0))} from a rank and "
                f"{format_bytes(max(plan.received_bytes, default=0))} to one",
                first="travels",
            ),
            f"memory      limit {limit} a rank beyond its parameters",
            *_wrap_lines(f"{format_seconds(plan.seconds)} predicted on {network_name(plan.topology)}", first="seconds"),
        ]
    )


def refit_object(plan: RefitPlan) -> dict[str, Any]:
    """Return a refit's plan as the object of `--json`."""
    return {
        "hash": plan.hash,
        "source": {"text": str(plan.source), "hash": plan.source.hash},
        "target": {"text": str(plan.target), "hash": plan.target.hash},
        "moves": moves_rows(plan),
        "dropped": list(plan.dropped),
        "ranks": list(plan.ranks),
        "sent_bytes": list(plan.sent_bytes),
        "received_bytes": list(plan.received_bytes),
        "memory_limit": plan.memory_limit,
        "seconds": plan.seconds,
        "network": network_name(plan.topology),
    }


def reshard_text(done: Any, dry_run: bool) -> str:
    """Return what `reshard` did, or would do: both sides, every stored parameter, files, memory and rate."""
    count, skipped = len(done.files), sum(f.skipped for f in done.files)
    lines = [
        *_wrap_lines(side_text(done.plan.source), first="source"),
        *_wrap_lines(f"{side_text(done.plan.target)}, form {done.form}", first="target"),
        f"parameters  {format_bytes(done.nbytes)}",
        *moves_text(done.plan),
        *dropped_text(done.plan),
        f"memory      {format_bytes(done.memory_bytes)} at most; the least that works is "
        f"{format_bytes(done.least_memory_bytes)}",
        *_wrap_lines(beside_text(done.beside), first="beside"),
        f"files       {count} of {format_bytes(done.nbytes)}{f'; {skipped} were finished' if skipped else ''}",
    ]
    if done.processes > 1:
        parts = [sum(f.nbytes for f in done.files if f.process == p) for p in range(done.processes)]
        lines.append(f"processes   {done.processes}, of {format_bytes(min(parts))} to {format_bytes(max(parts))} each")
    if dry_run:
        for f in done.files[:SHOWN]:
            who = f"  process {f.process}" if done.processes > 1 else ""
            lines.append(f"  {f.name}  {format_bytes(f.nbytes)}{who}")
            lines += _wrap_lines(f"needs {', '.join(f.parts or f.tensors)}", "      ")
        lines += [f"  ... and {count - SHOWN} more"] if count > SHOWN else []
        return "\n".join([*lines, "nothing was written"])
    written = sum(f.nbytes for f in done.files if not f.skipped)
    rate = format_bytes(written / max(done.seconds, 1e-9))
    return "\n".join([*lines, f"written     {format_bytes(written)} in {format_seconds(done.seconds)}, {rate}/s"])


def beside_text(names: Sequence[str]) -> str:
    """Return what is beside the tensors as one line; it says where a config is lacking."""
    return ", ".join(names) if "config.json" in names else ", ".join(["no config.json (--config gives one)", *names])


def reshard_object(done: Any) -> dict[str, Any]:
    """Return what `reshard` did as the object of `--json`."""
    return {
        "form": done.form,
        "source": side_text(done.plan.source),
        "target": side_text(done.plan.target),
        "parameters": moves_rows(done.plan),
        "dropped": list(done.plan.dropped),
        "files": [
            {
                "name": f.name,
                "bytes": f.nbytes,
                "tensors": list(f.tensors),
                "parts": list(f.parts),
                "skipped": f.skipped,
                "process": f.process,
            }
            for f in done.files
        ],
        "processes": done.processes,
        "total_bytes": done.nbytes,
        "memory_bytes": done.memory_bytes,
        "least_memory_bytes": done.least_memory_bytes,
        "read_bytes": done.read_bytes,
        "seconds": done.seconds,
    }


def derived_text(found: Any, files: Mapping[Path, WeightTable]) -> str:
    """Return what `derive` found: the loader, its trials, what was compared, the tables, and what to type next."""
    memory = found.memory
    count = len(found.ranks)
    runs = f"{count} trial{'s' if count > 1 else ''}, on {' and '.join(map(str, found.ranks))} rank(s)"
    checked = f"{found.elements} elements at sizes of no trial: equal" if found.elements else "at no other sizes"
    own = next((str(p) for p, t in files.items() if t is found.disk), found.disk.name)
    out = str(next(iter(files)))
    degree = ",tensor=2" if dict(memory.degrees).get("tensor") else ""
    return "\n".join(
        [
            *_wrap_lines(f"{found.loader}, {runs}, in {format_seconds(found.seconds)}", first="loader"),
            f"parameters  {len(memory.parameters)}",
            *_wrap_lines(checked, first="compared"),
            *_wrap_lines(f"{own} of its checkpoint, {out} of what it loads into", first="tables"),
            *_wrap_lines(f"shardplan convert FOLDER OUT --from {own} --to {out}{degree}", first="next"),
        ]
    )


def derived_object(found: Any, files: Mapping[Path, WeightTable]) -> dict[str, Any]:
    """Return what `derive` found as the object of `--json`."""
    return {
        "loader": found.loader,
        "ranks": list(found.ranks),
        "elements": found.elements,
        "checkpoint": found.disk.name,
        "files": [str(p) for p in files],
        "parameters": {p.name: str(p.form) for p in found.memory.parameters},
        "seconds": found.seconds,
    }


def diff_text(found: Any) -> str:
    """Return what `diff` found, in one line."""
    if found.difference is not None:
        return f"differ: {found.difference}"
    return f"equal: {found.parameters} parameters, {found.elements} elements"


def diff_object(found: Any) -> dict[str, Any]:
    """Return what `diff` found as the object of `--json`."""
    d = found.difference
    where = None
    if d is not None:
        keys = ("rank", "name", "index", "value", "other_rank", "other_name", "other_index", "other_value")
        where = {k: list(v) if isinstance(v := getattr(d, k), tuple) else v for k in keys}
        place = d.place
        where |= {"tensor": None if place is None else place[0], "place": None if place is None else list(place[1])}
    return {
        "equal": found.equal,
        "parameters": found.parameters,
        "elements": found.elements,
        "difference": where,
    }
