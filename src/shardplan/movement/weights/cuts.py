"""Which part of a dim an owner has, by the rule of a cut: intervals of its index space, in local order.

| rule | owner i of p, of a dim of n |
|---|---|
| (none) | n / p each; p must divide n |
| `.ceil` | from i ceil(n/p), at most ceil(n/p): torch.chunk, FSDP2, DTensor |
| `.first` | the first n mod p hold one more: vLLM's linear placement of experts |
| `.last` | the last n mod p hold one more: SGLang's pipeline |
| `.robin` | i, i + p, i + 2p, ...: vLLM's round-robin experts |
| `~` | as none; where p is a multiple of n, p / n neighbours share one |
| `.NAME` | as the table of this name says, given beside the degrees; as none where there is no such table |

A table is a list of counts, one an owner (`[23, 24, 24, 23]`), or a list of lists of indices (`[[0, 1], [2, 3, 0]]`),
in which an index may have several owners.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from shardplan.errors import LayoutError
from shardplan.movement.weights.form import EVEN, SHARED, FormCut

Intervals = tuple[tuple[int, int], ...]
OwnerTable = tuple[int, ...] | tuple[tuple[int, ...], ...]


class UnevenCut(LayoutError):
    """A dim of `size` that cannot be cut into equal pieces; `other` says what would be legal beside other degrees."""

    def __init__(self, message: str, size: int, other: str = "") -> None:
        """Take the message."""
        super().__init__(message)
        self.size, self.other = size, other


def intervals(cut: FormCut, n: int, owners: int, index: int, tables: Mapping[str, OwnerTable], what: str) -> Intervals:
    """Return what owner `index` of `owners` has of a dim of n, as (start, stop) in local order.

    `what` names the dim in messages. Raises `LayoutError` where the rule does not fit.

    >>> from shardplan.movement.weights.form import FormCut
    >>> [intervals(FormCut(("t",), "ceil"), 5, 4, i, {}, "f") for i in range(4)]
    [((0, 2),), ((2, 4),), ((4, 5),), ()]
    """
    small, more = divmod(n, owners)
    match cut.rule:
        case "even" | "shared":
            return _cut_evenly(cut, n, owners, index, what)
        case "ceil":
            chunk = -(-n // owners)
            return _make_interval(min(index * chunk, n), min(index * chunk + chunk, n))
        case "first":
            start = index * small + min(index, more)
            return _make_interval(start, start + small + (index < more))
        case "last":
            start = index * small + max(index - (owners - more), 0)
            return _make_interval(start, start + small + (index >= owners - more))
        case "robin":
            return tuple((i, i + 1) for i in range(index, n, owners)) if owners > 1 else _make_interval(0, n)
        case name:
            table = tables.get(name)
            return (
                _cut_evenly(cut, n, owners, index, what)
                if table is None
                else _cut_by_table(name, table, n, owners, index, what)
            )


def _make_interval(start: int, stop: int) -> Intervals:
    return ((start, stop),) if stop > start else ()


def _cut_evenly(cut: FormCut, n: int, owners: int, index: int, what: str) -> Intervals:
    if n % owners == 0:
        return _make_interval(index * (n // owners), (index + 1) * (n // owners))
    if cut.rule == SHARED and n and owners % n == 0:
        return _make_interval(index * n // owners, index * n // owners + 1)
    other = ""
    if cut.rule == SHARED:
        legal = "a number of pieces that divides it, or a multiple of it"
    elif cut.rule == EVEN:
        legal = "a number of pieces that divides it, or a rule for uneven cuts (.ceil, .first, .last, .robin)"
    else:
        legal = other = f"{cut.rule} = [...] beside the degrees: a count for each piece, or its indices"
    raise UnevenCut(f"{what} of {n} cannot be cut {cut} into {owners} equal pieces; legal is {legal}", n, other)


def _cut_by_table(name: str, table: OwnerTable, n: int, owners: int, index: int, what: str) -> Intervals:
    if len(table) != owners:
        raise LayoutError(
            f"{name} has {len(table)} entries, and {what} is cut into {owners}; legal is one for each piece"
        )
    counts: list[int] = []
    held: tuple[int, ...] = ()
    for k, entry in enumerate(table):
        match entry:
            case int():
                counts.append(entry)
            case tuple():
                held = entry if k == index else held
            case _:
                assert_never(entry)
    if counts:
        if sum(counts) != n:
            raise LayoutError(
                f"{name} counts {sum(counts)} in all, and {what} has {n}; legal are counts that add up to it"
            )
        return _make_interval(sum(counts[:index]), sum(counts[: index + 1]))
    wrong = [i for i in held if not 0 <= i < n]
    if wrong:
        raise LayoutError(f"{name} gives {what} {wrong[0]} to piece {index}; legal are 0 to {n - 1}")
    found: list[tuple[int, int]] = []
    for i in held:
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return tuple(found)
