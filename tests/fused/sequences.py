"""Random sequences of calls of the three operators on forked ranks, beside a reference that shares nothing with them.

Every rank draws the same sequence, works out with torch's own ops what it must get, and whether all must be refused.
Numbers are small integers, so that results are equal, not close. Arguments: ranks, sequences, seed, and `triton` for
the kernels of Triton in its interpreter, or `net` for a heap on which every rank is a node. Prints what was drawn, and
what was wrong, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

if "triton" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from tests.fused.forked import Exchange, forked

from shardplan import fused
from shardplan.errors import ShardplanError

GROUP = "sequences"
CALLS = 8  # of a sequence
LIFE = 10  # sequences between two resets of the heap
SECONDS = 30.0
ACTS: dict[str, Any] = {"none": lambda z: z, "relu": torch.relu}


@dataclass
class Drawn:
    """A call on all ranks: what each says, its operands, the call and the results; or a part of the refusal."""

    op: str
    says: list[Any]
    leaves: list[list[torch.Tensor]]
    run: Callable[[int, list[torch.Tensor]], torch.Tensor]
    results: Callable[[list[list[torch.Tensor]]], list[torch.Tensor]]
    refusal: str = ""
    summed: bool = False  # the result is one, the same on all ranks


@dataclass
class Pool:
    """Few shapes between two resets, so that they come again, alone and together."""

    rows: list[int]
    columns: list[int]
    dims: list[int]

    @classmethod
    def of(cls, seed: int, life: int) -> Pool:
        rng = np.random.default_rng([seed, life])
        rows, columns, dims = ([0, 1, 3, 4, 8], [1, 2, 4, 6], [1, 2, 5])
        return cls(*(rng.choice(x, n, replace=False).tolist() for x, n in ((rows, 2), (columns, 1), (dims, 2))))


def parts(n: int, ranks: int) -> list[int]:
    """Sizes of blocks of n, as the docs say: equal ones, the last shorter or empty."""
    size = -(-n // ranks)
    return [max(0, min(size, n - r * size)) for r in range(ranks)]


def numbers(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-4, 5, shape).astype(np.float32))


def each(rng: np.random.Generator, ranks: int, of: Sequence[int]) -> list[int]:
    """One for all ranks, or one for each."""
    found = [int(rng.choice(of)) for _ in range(ranks)]
    return found if rng.random() < 0.5 else found[:1] * ranks


def product(rng: np.random.Generator, pool: Pool, ranks: int) -> Drawn:
    """Blocks of rows or of columns, with and without splits, on all ranks or some, right or wrong."""
    scatter, n = int(rng.integers(2)), int(rng.choice(pool.columns))
    counts = rng.integers(0, 4, (ranks, ranks)) * (rng.random((ranks, ranks)) < 0.7)
    sends: list[Any] = [None] * ranks
    receives: list[Any] = [None] * ranks
    rows = each(rng, ranks, pool.rows)
    way, refusal = rng.choice(["plain", "splits", "some", "wrong"], p=[0.55, 0.2, 0.15, 0.1]), ""
    if scatter == 0:
        if way != "plain":
            given = [way != "some" or rng.random() < 0.5 for _ in range(ranks)]
            sends = [counts[s].tolist() if given[s] else None for s in range(ranks)]
            rows = [int(counts[s].sum()) if given[s] else rows[s] for s in range(ranks)]
        blocks = [sends[s] or parts(rows[s], ranks) for s in range(ranks)]
        if way != "plain":
            receives = [[blocks[s][d] for s in range(ranks)] if rng.random() < 0.6 else None for d in range(ranks)]
        cuts = blocks
        if way == "wrong":
            d = int(rng.integers(ranks))
            receives[d] = [blocks[s][d] + (s == 0) for s in range(ranks)]
            refusal = f"rank {d} wants {blocks[0][d] + 1} rows of rank 0, which sends {blocks[0][d]}"
    else:
        cut = parts(n, ranks)
        if way in ("splits", "wrong"):
            moves = rng.permutation(ranks)
            cut = [cut[k] for k in moves]
            sends = [list(cut) for _ in range(ranks)]
        if way == "wrong" and ranks > 1 and n:
            sends[-1] = (
                [n - 1, 1, *[0] * (ranks - 2)]
                if sends[0] != [n - 1, 1, *[0] * (ranks - 2)]
                else [0] * (ranks - 1) + [n]
            )
            refusal = " with sends " if sends[-1] != sends[0] else ""
        if way in ("splits", "some"):
            receives = [list(rows) if way == "splits" or rng.random() < 0.6 else None for _ in range(ranks)]
        if not refusal and len({*rows}) > 1 and None in receives:
            refusal = " with rows "
        cuts = [cut] * ranks
    depth = [int(rng.integers(0, 4)) for _ in range(ranks)]
    act, tiles = str(rng.choice(list(ACTS))), int(rng.choice([0, 0, 0, 2]))
    bias = bool(rng.random() < 0.4)
    columns = [n] * ranks
    if ranks > 1 and way == "plain" and rng.random() < 0.06:
        columns[-1], refusal = n + 1, " with N "
    leaves = [
        [numbers(rng, rows[s], depth[s]), numbers(rng, depth[s], columns[s]), *([numbers(rng, columns[s])] * bias)]
        for s in range(ranks)
    ]

    def run(rank: int, own: list[torch.Tensor]) -> torch.Tensor:
        splits = {"send_splits": sends[rank], "recv_splits": receives[rank]}
        return fused.gemm_all_to_all(
            own[0],
            own[1],
            own[2] if bias else None,
            group=GROUP,
            activation=act,
            scatter=scatter,
            tiles=tiles,
            **splits,
        )

    def results(all_: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        z = [ACTS[act](x[0] @ x[1] + (x[2] if bias else 0)) for x in all_]
        pieces = [torch.split(z[s], cuts[s], dim=scatter) for s in range(ranks)]
        return [torch.cat([pieces[s][d] for s in range(ranks)]) for d in range(ranks)]

    says = [("gemm", scatter, rows[s], columns[s], tiles, str(sends[s]), str(receives[s])) for s in range(ranks)]
    return Drawn("gemm", says, leaves, run, results, refusal)


def thin(rng: np.random.Generator, pool: Pool, ranks: int) -> Drawn:
    """In one shot and two, depths that differ; rows that differ, which is refused."""
    m, wide = int(rng.choice(pool.rows)), int(rng.integers(1, 3))
    rows = each(rng, ranks, pool.rows) if rng.random() < 0.25 else [m] * ranks
    depth = [int(rng.integers(0, 4)) for _ in range(ranks)]
    way = str(rng.choice(["auto", "one_shot", "two_shot"]))
    flat = [wide == 1 and rng.random() < 0.5 for _ in range(ranks)]
    leaves = [[numbers(rng, rows[s], depth[s]), numbers(rng, depth[s], wide)] for s in range(ranks)]

    def run(rank: int, own: list[torch.Tensor]) -> torch.Tensor:
        found = fused.gemv_all_reduce(own[0], own[1][:, 0] if flat[rank] else own[1], group=GROUP, algorithm=way)
        return found[:, None] if flat[rank] else found

    def results(all_: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [sum((x[0] @ x[1] for x in all_), torch.zeros(rows[0], wide))] * ranks

    says = [("gemv", rows[s], wide, way) for s in range(ranks)]
    return Drawn("gemv", says, leaves, run, results, " with M " if len({*rows}) > 1 else "", True)


def bags(rng: np.random.Generator, pool: Pool, ranks: int) -> Drawn:
    """Ranks without tables, parts of the batch that differ or are empty; dims, batches and counts that do not fit."""
    held = each(rng, ranks, [0, 1, 2])
    batch, dim, mode = int(rng.choice(pool.rows)), int(rng.choice(pool.dims)), "sum"
    given = 0 in held or rng.random() < 0.4
    splits = rng.permutation(parts(batch, ranks)).tolist() if given else parts(batch, ranks)
    named = list(held) if given or len({*held}) > 1 else None
    refusal = "" if any(held) else "tables of no rank"
    wrong = rng.choice(["", "dim", "counts", "batch"], p=[0.82, 0.06, 0.06, 0.06])
    dims, batches = [dim] * ranks, [batch] * ranks
    last = max((s for s in range(ranks) if held[s]), default=0)
    if wrong == "dim" and sum(h > 0 for h in held) > 1:
        dims[last], refusal = dim + 1, f"; rank {last}: {dim + 1}, torch.float32"
    elif wrong == "counts" and any(held) and ranks > 1:
        named = [*held]
        named[0] += 1
        refusal = f"table_counts {named}, but ranks hold {held}"
    elif wrong == "batch" and ranks > 1:
        batches[-1], refusal = batch + 1, " with batch "
    scaled = [bool(rng.random() < 0.4) for _ in range(ranks)]
    leaves: list[list[torch.Tensor]] = []
    ids: list[torch.Tensor] = []
    offsets: list[torch.Tensor] = []
    for s in range(ranks):
        sizes = rng.integers(1, 4, held[s])
        lengths = rng.integers(0, 3, (held[s], batches[s]))
        picked = [rng.integers(0, sizes[t], lengths[t].sum()) for t in range(held[s])]
        ids.append(torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *picked])))
        offsets.append(torch.from_numpy(np.concatenate([[0], lengths.ravel().cumsum()]).astype(np.int64)))
        tables = [numbers(rng, int(k), dims[s]) for k in sizes]
        leaves.append([*tables, *([numbers(rng, len(ids[s]))] * scaled[s])])

    def run(rank: int, own: list[torch.Tensor]) -> torch.Tensor:
        mine = [*splits[:-1], splits[-1] + batches[rank] - batch]
        more = {"table_counts": named, "batch_splits": mine if given or not held[rank] else None}
        tables, scale = own[: held[rank]], own[-1] if scaled[rank] else None
        return fused.embedding_bag_all_to_all(tables, ids[rank], offsets[rank], scale, group=GROUP, mode=mode, **more)

    def results(all_: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        columns: list[torch.Tensor] = []
        for s, own in enumerate(all_):
            for t in range(held[s]):
                edges = offsets[s][t * batch : (t + 1) * batch + 1].tolist()
                weights = own[-1] if scaled[s] else torch.ones(len(ids[s]))
                picked = [
                    (own[t][ids[s][a:b]] * weights[a:b, None]).sum(0) for a, b in zip(edges, edges[1:], strict=False)
                ]
                columns.append(torch.stack(picked) if picked else torch.zeros(0, dim))
        return list(torch.split(torch.stack(columns, 1), splits))

    says = [("bags", held[s], dims[s], batches[s], str(named), str(splits) if given else "") for s in range(ranks)]
    return Drawn("bags", says, leaves, run, results, refusal)


KINDS = (product, thin, bags)


def drawn(rng: np.random.Generator, pool: Pool, ranks: int) -> Drawn:
    """A call; of several ranks one in twenty is another operator on one of them."""
    one = KINDS[rng.integers(3)](rng, pool, ranks)
    if ranks > 1 and rng.random() < 0.05:
        other = KINDS[rng.integers(3)](rng, pool, ranks)
        if other.op != one.op:
            where = int(rng.integers(ranks))
            says = [(other if s == where else one).says[s] for s in range(ranks)]
            leaves = [(other if s == where else one).leaves[s] for s in range(ranks)]
            run = lambda rank, own: (other if rank == where else one).run(rank, own)  # noqa: E731
            return Drawn("other", says, leaves, run, one.results, " calls ")
    return one


class Rank:
    """A rank's way through sequences."""

    def __init__(self, heap: fused.SymmetricHeap) -> None:
        self.heap, self.rank, self.ranks = heap, heap.rank, heap.ranks
        self.count: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.met: set[Any] = set()
        self.own: list[set[Any]] = [set() for _ in range(heap.ranks)]

    def classify(self, one: Drawn) -> None:
        """Count a call by whether all ranks, or each alone, have made it since the last reset."""
        whole = tuple(one.says)
        alone = [s in own for s, own in zip(one.says, self.own, strict=True)]
        kind = (
            "known" if whole in self.met else "known apart" if all(alone) else "partly known" if any(alone) else "new"
        )
        self.count[kind] += 1
        self.count["uneven"] += len({*one.says}) > 1
        self.count["empty"] += any(0 in x.shape for own in one.leaves for x in own)
        self.count["refused"] += bool(one.refusal)
        self.count["calls"] += 1
        self.met.add(whole)
        for s, own in zip(one.says, self.own, strict=True):
            own.add(s)

    def say(self, what: str) -> None:
        if len(self.wrong) < 20:
            self.wrong.append(what)

    def sequence(self, seed: int, number: int) -> None:
        """Calls one after another, their backward at once, or later, the last one first."""
        rng, pool = np.random.default_rng([seed, self.ranks, number]), Pool.of(seed, number // LIFE)
        later: list[Callable[[], None]] = []
        for k in range(CALLS):
            one = drawn(rng, pool, self.ranks)
            mode = str(rng.choice(["off", "forward", "backward", "later"], p=[0.25, 0.15, 0.35, 0.25]))
            needs = [[bool(rng.random() < 0.5) for _ in own] for own in one.leaves]
            needs = [
                [n and rng.random() < 0.95 for n in own] if rng.random() < 0.7 else [False] * len(own) for own in needs
            ]
            ups_seed = int(rng.integers(1 << 30))
            self.classify(one)
            what = f"sequence {number} call {k} {one.op} {one.says} {mode}"
            back = self.call(one, mode, needs, ups_seed, what)
            if back is not None:
                if mode == "backward":
                    back()
                elif mode == "later":
                    later.append(back)
        for back in reversed(later):
            back()

    def call(self, one: Drawn, mode: str, needs: list[list[bool]], seed: int, what: str) -> Callable[[], None] | None:
        """Make a call and compare; return its backward."""
        own = [
            x.clone().requires_grad_(n and mode != "off")
            for x, n in zip(one.leaves[self.rank], needs[self.rank], strict=True)
        ]
        try:
            with torch.set_grad_enabled(mode != "off"):
                found = one.run(self.rank, own)
        except fused.HeapMismatch as error:
            if not one.refusal or one.refusal not in str(error) or "\n" in str(error):
                self.say(f"{what}: refused, {one.refusal!r} was to be: {error}")
            return None
        if one.refusal:
            self.say(f"{what}: not refused: {one.refusal}")
            return None
        leaves = [[x.clone().requires_grad_() for x in each] for each in one.leaves]
        wanted = one.results(leaves)
        if not torch.equal(found, wanted[self.rank]):
            self.say(f"{what}: {found.tolist()}, not {wanted[self.rank].tolist()}")
        self.count["values"] += 1
        if mode == "off":
            return None
        moves = one.op != "gemv" and self.ranks > 1
        if moves and not found.requires_grad:
            self.say(f"{what}: its result needs no gradient")
        if mode == "forward" or not found.requires_grad:
            return None
        rng = np.random.default_rng(seed)
        ups = [numbers(rng, *x.shape) for x in wanted]
        if one.summed:
            wanted, ups = wanted[:1], ups[:1]
        up = ups[0 if one.summed else self.rank]

        def back() -> None:
            found.backward(up)
            self.count["backward"] += 1
            some = [any(each) for each in needs]
            self.count["backward of some ranks"] += any(some) and not all(some)
            mine = leaves[self.rank]
            nothing = sum((0 * x.sum() for x in mine), torch.zeros(()))  # a result may be of none of them
            loss = sum(((x * g).sum() for x, g in zip(wanted, ups, strict=True)), nothing)
            grads = torch.autograd.grad(loss, mine, allow_unused=True, materialize_grads=True) if mine else ()
            for x, g in zip(own, grads, strict=True):
                if x.requires_grad and not torch.equal(torch.zeros_like(x) if x.grad is None else x.grad, g):
                    self.say(f"{what}: gradient {x.grad}, not {g}")
                elif not x.requires_grad and x.grad is not None:
                    self.say(f"{what}: a gradient that nobody asked for")

        return back


def work(rank: int, exchange: Exchange, numbers_: range, seed: int, way: str, seconds: float) -> dict[str, Any]:
    """All sequences on a rank; it stops at what is no refusal, as the others may then wait."""
    backend = f"net:127.0.0.1@{rank}" if way == "net" else "shm"
    with fused.SymmetricHeap.create(1 << 22, backend, exchange, "sequences") as heap:
        if way == "triton":
            from shardplan.fused.triton.serving import TritonKernels

            heap.kernels = TritonKernels(heap)
        heap.seconds = seconds
        fused.bind(GROUP, heap)
        found = Rank(heap)
        late = 0
        for number in numbers_:
            try:
                found.sequence(seed, number)
            except ShardplanError as error:
                late += isinstance(error, fused.FusedTimeout)
                found.say(f"sequence {number}: {type(error).__name__}: {error}")
                break
            found.count["sequences"] += 1
            if number % LIFE == LIFE - 1:
                heap.reset()
                found.met.clear()
                for own in found.own:
                    own.clear()
        fused.unbind(GROUP)
        return {"count": dict(found.count), "wrong": found.wrong, "late": late}


def tried(ranks: int, numbers_: range, seed: int, way: str = "", within: float = 600.0) -> list[Any]:
    """What all ranks found; of one that ended otherwise, the text."""
    with fused.SymmetricHeap.create(1 << 16, "virtual", lambda mine: [mine], "first") as heap:
        fused.bind(GROUP, heap)  # what a first call imports is there before ranks are forked
        fused.gemm_all_to_all(torch.ones(1, 1), torch.ones(1, 1), group=GROUP)
    return forked(ranks, lambda r, e: work(r, e, numbers_, seed, way, SECONDS), within)


def main() -> None:
    ranks, count, seed = map(int, sys.argv[1:4])
    print(json.dumps(tried(ranks, range(count), seed, *sys.argv[4:5], within=1800.0)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
