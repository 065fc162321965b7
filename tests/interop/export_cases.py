"""Reduction programs by hand, integer payloads, and what the reference makes of them; shared by the export children."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import numpy as np  # noqa: E402

import shardplan as sp  # noqa: E402
from shardplan.core.messages import at_root  # noqa: E402
from shardplan.core.ops import AllGather, AllReduce, Broadcast, Reduce, ReduceScatter, ToPartial  # noqa: E402
from shardplan.core.program import Program  # noqa: E402
from shardplan.core.reference import run_reference  # noqa: E402
from shardplan.core.step import Step  # noqa: E402
from shardplan.core.tensor import TensorType  # noqa: E402
from shardplan.errors import ShardplanError  # noqa: E402
from shardplan.hardware import Level, Placement, Topology  # noqa: E402

RANKS = 8


@dataclass(frozen=True)
class Case:
    name: str
    placement: Placement
    program: Program
    size: int  # elements of a payload

    @property
    def input_type(self) -> TensorType:
        return self.program.input_types[0]

    @property
    def whole(self) -> bool:
        """Whether a device that holds the result holds all of the payload."""
        return not any(self.program.output_types[0].layout.dims[:-1])

    def payloads(self) -> np.ndarray:
        """Integers [devices, size], in mesh order."""
        random = np.random.default_rng([len(self.name), self.size])
        return random.integers(-(10**6), 10**6, (self.input_type.mesh.size, self.size), dtype=np.int32)

    def expected(self) -> list[np.ndarray | None]:
        """What every device ends with, flat, by the reference; nothing where its value has no meaning."""
        t, u = self.input_type, self.program.output_types[0]
        local = t.local_shape()
        padded = np.zeros((t.mesh.size, math.prod(local)), np.int32)
        padded[:, : self.size] = self.payloads()
        (out,) = run_reference(self.program, [list(padded.reshape(-1, *local))])
        cut = slice(self.size) if self.whole else slice(None)
        return [x.reshape(-1)[cut] if held else None for x, held in zip(out, at_root(u), strict=True)]


def topology(**levels: int) -> Topology:
    return Topology("test", tuple(Level(name, n, "switch", 1e9, 0.0) for name, n in levels.items()))


def place(matrix: list[list[int]], levels: Topology, devices: list[int] | None = None) -> Placement:
    names = ("data", "tensor", "pipe")
    mesh = sp.Mesh({names[i]: math.prod(row) for i, row in enumerate(matrix)}, devices=devices)
    return Placement(mesh, levels, tuple(map(tuple, matrix)))


def chain(placement: Placement, axes: list[str], chunks: tuple[int, ...], size: int, *ops: object) -> Program:
    shape = (*chunks, max(1, -(-size // math.prod(chunks))))
    t = TensorType("i32", shape, (), placement.mesh_split(), partial=dict.fromkeys(axes, "sum"))
    steps = [Step(op, (str(k),), (str(k + 1),)) for k, op in enumerate(ops)]
    return Program({"0": t}, steps, (str(len(ops)),))


def cases() -> list[Case]:
    two, three = topology(node=2, gpu=4), topology(pod=2, node=2, gpu=2)
    flat = place([[2, 4]], two)
    deep = place([[2, 2, 2]], three)
    beside = place([[2, 2], [1, 2]], two)  # mesh order: data.node, data.gpu, tensor
    between = place([[2, 2], [2, 1]], topology(node=4, gpu=2))  # level order: data.node, tensor, data.gpu
    N, G = ("data.node",), ("data.gpu",)
    P = ("data.pod",)
    ND, GD = ("data.node", "tensor"), ("data.gpu",)
    found: list[Case] = []

    def add(name, placement, axes, chunks, size, *ops):
        found.append(Case(name, placement, chain(placement, axes, chunks, size, *ops), size))

    add("two levels, uneven", flat, ["data"], (2, 4), 101,
        ReduceScatter(1, G), AllReduce(N), AllGather(1, G))  # fmt: skip
    add("two levels, outer first", flat, ["data"], (2, 4), 64, ReduceScatter(0, N), AllReduce(G), AllGather(0, N))
    add("master", flat, ["data"], (2, 4), 99, Reduce(G), AllReduce(N), Broadcast(G))
    add("one all-reduce", flat, ["data"], (2, 4), 56, AllReduce((*N, *G)))
    add("fewer elements than chunks", flat, ["data"], (2, 4), 3, ReduceScatter(1, G), AllReduce(N), AllGather(1, G))
    add("three levels", deep, ["data"], (2, 2, 2), 77,
        ReduceScatter(2, G), ReduceScatter(1, N), AllReduce(P), AllGather(1, N), AllGather(2, G))  # fmt: skip
    add("gathered in another order", deep, ["data"], (2, 2, 2), 77,
        ReduceScatter(2, G), ReduceScatter(1, N), AllReduce(P), AllGather(2, G), AllGather(1, N))  # fmt: skip
    add("several dims at once", deep, ["data"], (2, 2, 2), 83,
        ReduceScatter((0, 1, 2), (*P, *N, *G)), AllGather(1, N), AllGather((0, 2), (*P, *G)))  # fmt: skip
    add("several dims, minor first", deep, ["data"], (2, 2, 2), 41,
        ReduceScatter((2, 0), (*G, *P)), AllReduce(N), AllGather((2, 0), (*G, *P)))  # fmt: skip
    add("master that scatters", deep, ["data"], (2, 2, 2), 90,
        Reduce(G), ReduceScatter(1, N), AllReduce(P), AllGather(1, N), Broadcast(G))  # fmt: skip
    add("master that scatters, broadcast before it is whole", deep, ["data"], (2, 2, 2), 90,
        Reduce(G), ReduceScatter(1, N), AllReduce(P), Broadcast(G), AllGather(1, N))  # fmt: skip
    add("master entered by dropping", deep, ["data"], (2, 2, 2), 50,
        AllReduce((*N, *G)), ToPartial((*N, *G), "root"), AllReduce(P), Broadcast((*N, *G)))  # fmt: skip
    add("reduce all the way, broadcast back", deep, ["data"], (2, 2, 2), 50,
        Reduce(G), Reduce(N), Reduce(P), Broadcast(P), Broadcast(N), Broadcast(G))  # fmt: skip
    add("beside another axis", beside, ["data"], (2, 2), 45, ReduceScatter(1, G), AllReduce(N), AllGather(1, G))
    add("two axes on a level", beside, ["data", "tensor"], (2, 4), 61,
        ReduceScatter((1, 1), (*G, "tensor")), AllReduce(N), AllGather((1, 1), (*G, "tensor")))  # fmt: skip
    add("level order is not mesh order", between, ["data", "tensor"], (4, 2), 61,
        ReduceScatter((0, 0, 1), (*ND, *GD)), AllGather((0, 0, 1), (*ND, *GD)))  # fmt: skip
    add("level order, inner first", between, ["data", "tensor"], (4, 2), 61,
        ReduceScatter(1, GD), AllReduce(ND), AllGather(1, GD))  # fmt: skip
    add("level order, master", between, ["data", "tensor"], (4, 2), 61, Reduce(GD), AllReduce(ND), Broadcast(GD))
    add("level order, one axis of it", between, ["tensor"], (2,), 13, ReduceScatter(0, ("tensor",)),
        AllGather(0, ("tensor",)))  # fmt: skip
    shuffled = place([[2, 4]], two, [5, 0, 3, 6, 1, 7, 4, 2])
    add("ranks out of order", shuffled, ["data"], (2, 4), 101,
        ReduceScatter(1, G), AllReduce(N), AllGather(1, G))  # fmt: skip
    add("ranks out of order, master", shuffled, ["data"], (2, 4), 20, Reduce(G), AllReduce(N), Broadcast(G))
    six = place([[3, 2]], topology(node=3, gpu=2), [1, 2, 3, 4, 5, 6])
    add("six of eight ranks", six, ["data"], (3, 2), 100, ReduceScatter(0, N), AllReduce(G), AllGather(0, N))
    add("six of eight ranks, master", six, ["data"], (3, 2), 100, Reduce(G), AllReduce(N), Broadcast(G))
    add("ends in shards", flat, ["data"], (2, 4), 101, ReduceScatter(1, G), AllReduce(N))
    add("ends at a root", flat, ["data"], (2, 4), 101, Reduce(G), AllReduce(N))
    for algorithm in ("ring", "tree"):
        found += [planned(p, algorithm, 50) for p in (flat, beside, between)]
    return found + [random_case(seed, RANKS) for seed in range(6)]


def planned(placement: Placement, algorithm: str, size: int) -> Case:
    """The best program that the planner finds, on integers: every group has a payload of its own."""
    found = sp.reduce(placement, "data", 4 * size, algorithm=algorithm).program
    t = found.input_types[0]
    source = TensorType("i32", t.shape, t.layout, t.mesh)
    program = Program({"0": source}, found.steps, found.outputs)
    return Case(f"planned, {algorithm}, {placement.describe()}", placement, program, size)


def random_case(seed: int, devices: int = 16) -> Case:
    """A reduction program of random ops that type, and then of what is left to do."""
    random = np.random.default_rng(seed)
    choices = [s for s in ((4,), (2, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2), (2, 3, 2), (2, 2, 4), (3, 2, 2))
               if math.prod(s) <= devices]  # fmt: skip
    sizes = choices[random.integers(len(choices))]
    names = ("pod", "node", "gpu")[: len(sizes)]
    placement = place([list(sizes)], topology(**dict(zip(names, sizes, strict=True))),
                      random.permutation(math.prod(sizes)).tolist())  # fmt: skip
    axes = [f"data.{n}" for n in names] if len(names) > 1 else ["data"]
    size = int(random.integers(1, 40))
    ops: list[object] = []
    for _ in range(int(random.integers(0, 12))):
        some = [a for a in axes if random.random() < 0.6] or axes[:1]
        if random.random() < 0.4:
            some = list(random.permutation(some))
        dims = tuple(axes.index(a) for a in some)
        kind = random.integers(6)
        op = (ReduceScatter(dims, tuple(some)), AllReduce(tuple(some)), AllGather(dims, tuple(some)),
              Reduce(tuple(some)), Broadcast(tuple(some)), ToPartial(tuple(some), "root"))[kind]  # fmt: skip
        try:
            chain(placement, ["data"], sizes, size, *ops, op)
        except ShardplanError:
            continue
        ops.append(op)
    last = chain(placement, ["data"], sizes, size, *ops).output_types[0]
    mesh = last.mesh
    held = {a: next((d for d, run in enumerate(last.atoms) if set(mesh.expand((a,))) <= set(run)), None) for a in axes}
    inside = lambda names, a: set(mesh.expand((a,))) <= set(mesh.expand(names))  # noqa: E731
    ops += [AllReduce((a,)) for a in axes if inside(last.layout.partial, a)]
    ops += [AllGather(d, (a,)) for a, d in held.items() if d is not None]
    ops += [Broadcast((a,)) for a in axes if inside(last.layout.root, a)]
    return Case(f"seed {seed}", placement, chain(placement, ["data"], sizes, size, *ops), size)
