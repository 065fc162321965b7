"""What every rank says of a call: a word at each, compared, and all of it where the words are new.

What a rank knows of its own call alone decides nothing: the others may call something else. So every call begins with
a word of all ranks, a hash of what each calls. All see the same words, and so all have met them before, and go on with
what they made of them then, or none has, and all tell each other what they call, and go on or refuse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeVar

from shardplan.errors import ShardplanError, line
from shardplan.fused.heap.failures import HeapMismatch
from shardplan.fused.heap.header import DIGEST
from shardplan.fused.heap.symmetric import SymmetricHeap

MOST = 1024  # agreements that a heap remembers: the oldest goes first, the same one on all ranks
KNOWN = "agreements"
SAME = "the same call on all"
ALL_BACK = "a function of shardplan.fused, which has every rank take part in backward"
Facts = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CallKind:
    """An operator's calls: names of the facts that a rank says of one, and which of them must be `alike` on all.

    Where a rank gives one of those in `varying`, data decides them, and the agreement is not remembered.
    """

    op: str
    facts: tuple[str, ...]
    alike: tuple[str, ...]
    varying: tuple[str, ...] = ()


@lru_cache(maxsize=4096)
def digest(op: str, values: tuple[Hashable, ...]) -> int:
    """Return the hash of a call's facts, the same in every process."""
    return int.from_bytes(blake2b(repr((op, values)).encode(), digest_size=DIGEST // 8).digest())


def agree_on_call(
    heap: SymmetricHeap,
    kind: CallKind,
    values: tuple[Hashable, ...],
    seconds: float,
    make: Callable[[list[Facts], bool], T],
) -> T:
    """Return what `make` makes of all ranks' facts, or made of them before; collective: every call begins so.

    `values` are those of `kind.facts` on this rank. `make` is given the facts of all ranks, and whether data decides
    them; what it raises it must raise on all ranks, as what it is given is the same. Raises `HeapMismatch`, on all
    ranks, where they call different operators or a fact in `kind.alike` differs, and as `HeapHeader.begin` and `wait`.
    """
    header = heap.header
    header.begin(kind.op)
    try:
        known: dict[tuple[int, ...], T] | None = heap.kept.get(KNOWN)
        if known is None:
            known = heap.kept[KNOWN] = {}
        words = header.exchange(digest(kind.op, values), known, seconds, kind.op)
        found = known.get(words)
        if found is None:
            mine = {"op": kind.op} | dict(zip(kind.facts, values, strict=True))
            note = json.dumps(mine, default=str).encode()
            said: list[Facts] = [json.loads(raw) for raw in header.gather(note, seconds, kind.op)]
            for fact in ("op", *kind.alike):
                check_alike(kind.op, said, fact, SAME)
            varying = any(each[fact] is not None for each in said for fact in kind.varying)
            found = make(said, varying)
            if not varying:
                if len(known) >= MOST:
                    del known[next(iter(known))]
                known[words] = found
    except BaseException as error:
        if not isinstance(error, ShardplanError):  # those come on all ranks, or have been told
            header.propagate_error(kind.op, error)
        raise
    return found


def check_alike(op: str, said: Sequence[Facts], fact: str, legal: str) -> None:
    """Raise `HeapMismatch` naming the ranks by what they say of a fact, where that differs."""
    calls: dict[str, list[int]] = {}
    for rank, each in enumerate(said):
        call = each["op"] if fact == "op" else line(f"{each['op']} with {fact} {each.get(fact)}")
        calls.setdefault(call, []).append(rank)
    if len(calls) > 1:
        raise HeapMismatch(
            f"{op}: {', '.join(f'{describe_callers(ranks)} {call}' for call, ranks in calls.items())}; legal is {legal}"
        )


def describe_callers(ranks: Sequence[int]) -> str:
    """Return ranks as the subject of a sentence, with its verb.

    >>> describe_callers([1]), describe_callers([0, 2, 3])
    ('rank 1 calls', 'ranks 0, 2, 3 call')
    """
    return f"rank {ranks[0]} calls" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} call"
