"""`usual_calls`: what a bare size of traffic means, as people say it: a step's bytes, in as many calls as is usual.

`tensor=2GB` is no collective of 2 GB. Activations go a microbatch of a layer at a time; gradients go in buckets while
the backward pass goes on, and only the last bucket has nothing beside which it could run. A count (`*24`) says how
often a collective of the size runs, and `behind` what hides it: where one is said, it holds.
"""

from __future__ import annotations

import math

from shardplan.hardware.units import format_bytes
from shardplan.launches.megatron import name_of
from shardplan.movement.placing.traffic import Demand, Row, parse_traffic

BUCKET = 160e6  # bytes: 40 million gradients in f32, Megatron-LM's `--ddp-bucket-size` by default
ACTIVATION = 64e6  # bytes: 4096 tokens of 8192 features in bf16


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
        gradients = all(name_of(axis) == "dp" for axis in axes) and Demand(axes, op, nbytes).letters[:1] == ("P",)
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
