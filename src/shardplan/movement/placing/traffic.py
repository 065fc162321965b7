"""The traffic of a job: what a step communicates, one collective over some axes of a mesh at a time.

Traffic, as `place` and `audit` take it, maps axes to the bytes of one all-reduce a step, or to a list of
`(op, bytes, count)`; bytes are what a member holds before the op. What runs behind compute, such as the gradients of
data parallelism behind the backward pass, says so in a fourth place: a part of its own seconds (`"90%"`), or the
seconds of compute that hide it (`"120ms"`). It costs what sticks out.

As text a bare size is what people say: a step's bytes, in as many calls as is usual (`usual_calls`). `tensor=2GB` is no
collective of 2 GB. Activations go a microbatch of a layer at a time; gradients go in buckets while the backward pass
goes on, and only the last bucket has nothing beside which it could run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.core import ops, validation
from shardplan.core.mesh import Mesh
from shardplan.core.pattern import Groups, Pattern, communicates
from shardplan.core.program import Program
from shardplan.core.walk import program_leaves
from shardplan.errors import LayoutError, ParseError, excerpt
from shardplan.hardware.prices.cost import PRICED
from shardplan.hardware.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from shardplan.movement.reductions.type_graph import factor_states

OPS = PRICED  # that traffic may name
Row = tuple[str, float | str, float] | tuple[str, float | str, float, str]
Rows = float | str | Sequence[Row]
Traffic = Mapping[tuple[str, ...], Rows] | Mapping[str, Rows] | Mapping[tuple[str, ...] | str, Rows]
DATA = ("dp", "data")  # what an axis of replicas is called: it sums gradients
PIPELINE = ("pp", "pipeline", "pipe", "stage")  # what an axis of stages is called: each sends to the next
_TERM = re.compile(
    r"\s*(?P<axes>[A-Za-z_]\w*(?:\s*\+\s*[A-Za-z_]\w*)*)\s*=\s*(?:(?P<op>[a-z_]+)\s*:)?"
    r"(?P<bytes>[^*:=,]+?)\s*(?:\*\s*(?P<count>\d+(?:\.\d+)?))?(?:\s+behind\s+(?P<behind>[^*:=,]+?))?\s*"
)
_NUMBERS = (float, int, np.integer, np.floating)
BUCKET = 160e6  # bytes: 40 million gradients in f32, Megatron-LM's `--ddp-bucket-size` by default
ACTIVATION = 64e6  # bytes: 4096 tokens of 8192 features in bf16
MOST = 1e100  # bytes of a demand in a step: any sum over devices is finite


@dataclass(frozen=True, slots=True)
class Demand:
    """One collective of a step."""

    axes: tuple[str, ...]  # that it runs over, in mesh order
    op: str  # one of `OPS`
    nbytes: float  # that a member holds before it
    count: float = 1.0  # how often a step of the job runs it
    hidden_part: float = 0.0  # of its seconds a step that run behind compute
    hidden_seconds: float = 0.0  # of compute a step that hide what is left of them

    def __str__(self) -> str:
        """Say the demand in a line."""
        times = "" if self.count == 1 else f" x {self.count:g}"
        return f"{self.op} over {', '.join(self.axes)}: {format_bytes(self.nbytes)}{times}{self.hidden_text}"

    @property
    def hidden_text(self) -> str:
        """Behind how much compute it runs, as traffic says it; empty where behind none."""
        if self.hidden_part:
            return f" behind {100 * self.hidden_part:g}%"
        return f" behind {format_seconds(self.hidden_seconds)}" if self.hidden_seconds else ""

    def exposed_seconds(self, seconds: float) -> float:
        """Return what a step waits of the seconds that the demand takes in it: what compute does not hide.

        >>> Demand(("data",), "all_reduce", 2e9, hidden_seconds=0.05).exposed_seconds(0.065)
        0.015
        """
        return max(0.0, seconds - seconds * self.hidden_part - self.hidden_seconds)

    @property
    def letters(self) -> tuple[str, str]:
        """Those of every factor before and after (see `reductions.type_graph`); empty where it is no reduction."""
        return factor_states(self.op)

    @property
    def shifts(self) -> bool:
        """Whether a device has one peer, the next member, rather than a group."""
        return bool(ops.OPS[self.op].peers)

    def payload(self, members: int) -> float:
        """Return the bytes of the payload that the op is a part of: of an all-gather those held after."""
        return self.nbytes * (members if self.letters[0] == "S" else 1)


def demands_of(traffic: Traffic | str, mesh: Mesh) -> tuple[Demand, ...]:
    """Return the demands of traffic in the order given, the axes of each in mesh order.

    Traffic maps axes, or the name of one, to all-reduce bytes or to a list of `(op, bytes, count)`; bytes may be text
    (`"2 GB"`), and so may the whole: `"data=2GB"`, see `usual_calls`.

    Raises `LayoutError` where an axis is unknown or stands twice, an op is unknown, or bytes or a count are no number
    of 0 or more.

    >>> [str(d) for d in demands_of({("data",): 2e9}, Mesh(data=4, tensor=2))]
    ['all_reduce over data: 2 GB']
    """
    found: list[Demand] = []
    if isinstance(traffic, str):
        traffic = usual_calls(traffic)[0]
    for key, value in validation.table("traffic", traffic, "axes to bytes, or its text such as 'data=2GB'").items():
        axes = validation.names("the axes of traffic", key)
        if not axes or len(set(axes)) < len(axes):
            raise LayoutError(f"traffic over {axes}: legal are distinct axes, one or more; {mesh.legal()}")
        mesh.expand(axes)
        rows = [("all_reduce", value, 1.0)] if isinstance(value, (*_NUMBERS, str)) else value
        for row in validation.items(f"traffic over {axes}", rows, "rows (op, bytes, count); or it is bytes"):
            if not isinstance(row, (tuple, list)) or len(row) not in (3, 4):
                raise LayoutError(f"traffic over {axes}: {excerpt(row)}; legal are bytes, or rows (op, bytes, count)")
            op, nbytes, count = row[:3]
            if not isinstance(op, str) or op not in OPS:
                raise LayoutError(f"traffic over {axes}: op {excerpt(op)} is unknown; legal: {', '.join(OPS)}")
            nbytes = parse_bytes(nbytes) if isinstance(nbytes, str) else nbytes
            if not all(
                isinstance(x, _NUMBERS) and not isinstance(x, bool) and 0 <= x < math.inf for x in (nbytes, count)
            ):
                raise LayoutError(
                    f"traffic over {axes}: {op} of {excerpt(nbytes)} bytes, {excerpt(count)} times; legal are finite "
                    "numbers of 0 or more"
                )
            if any((x if isinstance(x, int) else float(x)) > MOST for x in (nbytes, count)):
                raise LayoutError(
                    f"traffic over {axes}: {excerpt(nbytes)} bytes, {excerpt(count)} times; at most {MOST:g}"
                )
            hidden = (
                (0.0, 0.0)
                if len(row) == 3
                else _hidden_part(validation.text(f"what hides traffic over {axes}", row[3]))
            )
            found.append(Demand(tuple(a for a in mesh.axes if a in axes), op, float(nbytes), float(count), *hidden))
    return tuple(found)


def _hidden_part(text: str) -> tuple[float, float]:
    """The part of its seconds that a demand runs behind compute, and the seconds of compute: one of them is 0."""
    if not text.rstrip().endswith("%"):
        return 0.0, parse_seconds(text)
    number = text.rstrip()[:-1].strip()
    if not re.fullmatch(r"\d+(\.\d+)?", number) or float(number) > 100:
        raise ParseError(f"{text!r} is no part of the seconds; legal is 0% to 100%, or seconds such as 120ms")
    return float(number) / 100, 0.0


def parse_traffic(
    text: str, bare: Callable[[tuple[str, ...], Row], Row] | None = None
) -> dict[tuple[str, ...], list[Row]]:
    """Return the traffic that a text says, as the command line takes it; terms over the same axes add up to a list.

    The terms `axes=bytes` have commas between them: `data=2GB, tensor=500MB`. Joint axes are joined by `+`, another op
    than all_reduce (`permute` for an axis called pp, pipeline, pipe or stage) stands before the bytes, and a count
    after: `data+tensor=all_gather:64MB*24`. Last stands what runs behind compute: `data=2GB behind 120ms` of it a step,
    or `behind 90%` of its own seconds. A size without a count is one call, or what `bare` makes of its axes and row.

    Raises `ParseError` where a term is malformed, or its unit or its op unknown; it points at the term.

    >>> parse_traffic("data=2GB, tensor=all_to_all:1kB*3")
    {('data',): [('all_reduce', 2000000000.0, 1.0)], ('tensor',): [('all_to_all', 1000.0, 3.0)]}
    """
    found: dict[tuple[str, ...], list[Row]] = {}
    validation.text("traffic", text, ParseError)
    start = 0
    for term in text.split(","):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ParseError(
                f"expected axes=bytes, such as data=2GB or data+tensor=all_gather:64MB*24, got {term.strip()!r}",
                text,
                start,
            )
        axes = tuple(axis.strip() for axis in match["axes"].split("+"))
        op = match["op"] or ("permute" if len(axes) == 1 and axes[0] in PIPELINE else "all_reduce")
        if op not in OPS:
            raise ParseError(f"op {op!r} is unknown; legal: {', '.join(OPS)}", text, start + match.start("op"))
        part = "bytes"
        try:
            nbytes = parse_bytes(match["bytes"])
            if match["behind"] is not None:
                part = "behind"
                _hidden_part(match["behind"])
        except ParseError as error:
            reason = str(error).split("\n", 1)[0]
            raise ParseError(reason, text, start + match.start(part)) from None
        once = op, nbytes, float(match["count"] or 1)
        row: Row = once if match["behind"] is None else (*once, match["behind"])
        found.setdefault(axes, []).append(row if match["count"] or bare is None else bare(axes, row))
        start += len(term) + 1
    return found


def usual_calls(text: str) -> tuple[dict[tuple[str, ...], list[Row]], tuple[str, ...]]:
    """Return the traffic of a text, of a bare size in as many calls as is usual, and a line for each such size.

    Raises as `parse_traffic` does.

    >>> found, lines = usual_calls("dp=4GB,tp=2GB,pp=64MB*8")
    >>> found["tp",], lines[1]
    ([('all_reduce', 62500000.0, 32.0)], '`tp`: 2 GB a step as 32 calls of 62.5 MB; tp=SIZE*N says N calls of SIZE')
    >>> found["dp",][0][3], found["pp",]
    ('96.0000%', [('permute', 64000000.0, 8.0)])
    """
    lines: list[str] = []

    def bare(axes: tuple[str, ...], row: Row) -> Row:
        op, nbytes = row[0], float(row[1])
        gradients = all(axis in DATA for axis in axes) and Demand(axes, op, nbytes).letters[:1] == ("P",)
        calls = max(1, math.ceil(nbytes / (BUCKET if gradients else ACTIVATION)))
        if calls == 1:
            return row
        name, each = "+".join(axes), nbytes / calls
        told = f"`{name}`: {format_bytes(nbytes)} a step as {calls} calls of {format_bytes(each)}"
        says = f"; {name}=SIZE*N says N calls of SIZE"
        if len(row) > 3 or not gradients:
            lines.append(told + says)
            return (op, each, float(calls), row[3]) if len(row) > 3 else (op, each, float(calls))
        lines.append(f"{told}, all but the last behind compute{says}")
        return op, each, float(calls), f"{100 * (calls - 1) / calls:.4f}%"

    return parse_traffic(text, bare), tuple(lines)


def program_traffic(program: Program) -> tuple[Mesh, tuple[Demand, ...], tuple[tuple[int, Pattern], ...]]:
    """Return a program's mesh, its collectives over whole axes as demands, and all else that moves, with how often.

    Raises `LayoutError` for a program on several meshes.
    """
    meshes = program.meshes
    if len(meshes) != 1:
        raise LayoutError(f"place needs a program on one mesh; this one has {len(meshes)}")
    mesh = meshes[0]
    found: dict[tuple[tuple[str, ...], str, float], float] = {}
    others: list[tuple[int, Pattern]] = []
    for times, op, operands in program_leaves(program):
        pattern = op.pattern(*operands)
        if not communicates(pattern):
            continue
        axes = op.members(operands[0])
        whole = all(a in mesh.axes for a in axes) and not any(t.layout.root for t in operands)
        if (
            whole
            and isinstance(pattern, Groups)
            and pattern.composed is None
            and len(set(pattern.nbytes.tolist())) == 1
        ):
            key = tuple(a for a in mesh.axes if a in axes), pattern.kind, float(pattern.nbytes[0])
            found[key] = found.get(key, 0.0) + times
        else:
            others.append((times, pattern))
    return mesh, tuple(Demand(axes, op, nbytes, n) for (axes, op, nbytes), n in found.items()), tuple(others)
