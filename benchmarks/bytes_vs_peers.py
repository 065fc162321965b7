"""Bytes, rounds and memory of our plans against the lower bound and against the peers.

`python -m benchmarks.bytes_vs_peers [--count 300] [--seed 0]`: `--count` problems of s8, two thirds as many of s16.
Every peer plans every problem; XLA compiles in child processes. Then Shardy's pass alone: the inputs of its own tests,
and a third of `--count` problems on each of several larger meshes. The measure is the specification's: bytes received
by the device that receives most, over the largest lower bound; the cost that no peer may undercut is the larger of what
a device sends and receives in each step, along the longest chain, plus 0.2 % of the memory bound a round (a chunk is a
round). Peers' plans are chains without chunks, of ops in which the worst device sends as much as the worst receives.
"""

from __future__ import annotations

import collections
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.common import (
    FAMILIES,
    Facts,
    Progress,
    arguments,
    charged,
    facts,
    geomean,
    record,
    single,
    table,
    to_peer,
    told,
    write,
)
from benchmarks.peers import dtensor, shardy, xla
from benchmarks.peers.problem import Moves, Problem, lower_bound, memory_bound
from benchmarks.peers.shardy import TESTS

import shardplan as sp
from benchmarks import suites
from shardplan.plans.certificate import Certificate
from shardplan.plans.pricing import fabric_of, price_program

OURS = ("default", "portable")
XLA = "xla"
PEERS: dict[str, Callable[[Problem], Moves | None]] = {
    "shardy pass": shardy.plan,
    "dtensor greedy": lambda p: dtensor.plan(p, "greedy"),
    "dtensor min-cost": lambda p: dtensor.plan(p, "min-cost"),
    "dtensor min-cost x64": lambda p: dtensor.plan(p, "min-cost", scale=64),
}
NAMES = (XLA, *PEERS)
SHARDY = "shardy pass"
OWN_TESTS = "shardy's own tests"
LARGER: dict[str, tuple[int, ...]] = {
    "2^6": (2,) * 6, "2^8": (2,) * 8, "8 x 8 x 8": (8, 8, 8), "12 x 12 x 12": (12, 12, 12), "20 x 10": (20, 10),
    "24 x 6": (24, 6),
}  # fmt: skip
TIE = 1e-9
TWO_NODES = """
name = "two nodes"
[device]
flops = {{ f32 = "1 TFLOP/s" }}
memory = "80 GB"
memory_bandwidth = "2 TB/s"
[[levels]]
name = "node"
size = 2
link = "switch"
bandwidth = "25 GB/s"
latency = "5 us"
uplinks = {half}
[[levels]]
name = "gpu"
size = {half}
link = "switch"
bandwidth = "300 GB/s"
latency = "2 us"
"""


@dataclass(slots=True)
class Row:
    """One problem and what everybody makes of it."""

    text: str
    problem: Problem
    least: int
    bound: int
    ours: dict[str, Facts]
    slow: dict[str, float]  # bytes over all devices that cross from node to node, per byte of the array
    peers: dict[str, Moves] = field(default_factory=dict)

    @property
    def rematerialised(self) -> bool:
        """Whether XLA replicates fully here."""
        return self.peers[XLA].rematerialised

    def bytes_of(self, name: str) -> int | None:
        """Bytes at the device that receives most; None where a peer is wrong or cannot say the problem."""
        if name in self.ours:
            return self.ours[name].received
        moves = self.peers.get(name)
        return moves.received_total_worst() if moves is not None and moves.correct else None

    def cost_of(self, name: str) -> float | None:
        """Bytes and the charge of the rounds."""
        if name in self.ours:
            return self.ours[name].charged
        moves = self.peers.get(name)
        return moves.charged(self.bound) if moves is not None and moves.correct else None

    def rounds_of(self, name: str) -> int:
        """Rounds of all steps."""
        return self.ours[name].rounds if name in self.ours else self.peers[name].rounds_total()

    def largest_of(self, name: str) -> int:
        """The largest local tensor."""
        return self.ours[name].largest if name in self.ours else self.peers[name].largest

    def to_json(self) -> dict[str, Any]:
        """The row, short."""
        out: dict[str, Any] = {"problem": self.text, "lower_bound_bytes": self.least, "bound_bytes": self.bound}
        for name, one in self.ours.items():
            out[name] = {"bytes": one.received, "rounds": one.rounds, "peers": one.peers, "largest": one.largest,
                         "slow": self.slow[name], "family": one.family, "ops": " | ".join(one.ops)}  # fmt: skip
        for name, moves in self.peers.items():
            got = self.bytes_of(name)
            if got is None:
                out[name] = {"error": moves.error[:160]}
                continue
            rounds, largest = moves.rounds_total(), moves.largest
            out[name] = {"bytes": got, "cost": self.cost_of(name), "rounds": rounds, "largest": largest}
            if moves.rematerialised:
                out[name]["rematerialised"] = True
        return out


def solve(suite: str, seed: int, count: int) -> list[Row]:
    """Plan all problems of a suite with us and with every peer."""
    rows: list[Row] = []
    progress = Progress(suite, count)
    for s, t in single(suites.problems(suite, seed, count)):
        problem = to_peer(s, t)
        if problem is None:
            raise ValueError(f"the peers cannot say {told(s, t)}")
        rows.append(our_row(s, t, problem))
        for name, peer in PEERS.items():
            if (moves := peer(problem)) is not None:
                rows[-1].peers[name] = moves
        progress.add()
    for row, moves in zip(rows, xla.plan_many([row.problem for row in rows]), strict=True):
        row.peers[XLA] = moves
    return rows


def our_row(s: sp.TensorType, t: sp.TensorType, problem: Problem) -> Row:
    """Plan with and without the whole-mesh exchange, and check that both sides mean the same bounds."""
    plans = {"default": sp.redistribute(s, t), "portable": sp.redistribute(s, t, portable=True)}
    for plan in plans.values():
        plan.certificate.check()
        _agree(plan.certificate, problem)
    least, bound = lower_bound(problem), memory_bound(problem)
    fabric = fabric_of(sp.Topology.parse(TWO_NODES.format(half=s.mesh.size // 2)), (s.mesh,))
    slow = {name: price_program(plan.program, fabric).level_bytes[0] / s.nbytes for name, plan in plans.items()}
    return Row(told(s, t), problem, least, bound, {k: facts(p) for k, p in plans.items()}, slow)


def _agree(certificate: Certificate, problem: Problem) -> None:
    """Raise unless the certificate states the bounds that the peers' accounting finds."""
    found = max(certificate.lower_bound_bytes), certificate.bound_bytes
    if found != (wanted := (lower_bound(problem), memory_bound(problem))):
        raise ValueError(f"{problem}: the certificate states the bounds {found}, the peers' accounting finds {wanted}")


# Shardy's pass alone.


def larger(sizes: Sequence[int], seed: int, count: int) -> Iterator[tuple[sp.TensorType, sp.TensorType]]:
    """Even problems of 2 or 3 dims on a mesh of these sizes; half of the layouts leave out few axes, half any."""
    rng, mesh, found = random.Random(f"larger {sizes} {seed}"), suites.make_mesh(sizes), 0
    while found < count:
        keep = rng.choice((suites.KEEP, None))
        s, t = suites.even_pair(rng, mesh, rng.choice((2, 3)), most_multiple=2, keep=keep)
        if s != t:
            found += 1
            yield s, t


def own_tests() -> Iterator[tuple[sp.TensorType, sp.TensorType]]:
    """The inputs of the tests of Shardy's pass."""
    for line in TESTS.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            mesh, ends = line.split(": ", 1)
            source, target = ends.split(" -> ")
            yield sp.TensorType.parse(source, mesh), sp.TensorType.parse(target, mesh)


def against_shardy(name: str, pairs: Sequence[tuple[sp.TensorType, sp.TensorType]]) -> dict[str, Any]:
    """What Shardy's pass and our plans cost on the problems that it solves."""
    progress = Progress(name, len(pairs))
    rows: list[dict[str, Any]] = []
    for s, t in pairs:
        problem = to_peer(s, t)
        if problem is None:
            raise ValueError(f"the peers cannot say {told(s, t)}")
        moves, bound, row = shardy.plan(problem), memory_bound(problem), {"problem": told(s, t)}
        if moves.correct:
            row[SHARDY] = moves.charged(bound)
        for mode in OURS:
            row[mode] = charged(sp.redistribute(s, t, portable=mode == "portable"))
        rows.append(row)
        progress.add()
    solved = [row for row in rows if SHARDY in row]
    out: dict[str, Any] = {"problems": len(rows), "solved by shardy": len(solved)}
    for mode in OURS:
        ratios = [row[SHARDY] / row[mode] for row in solved if row[mode]]
        dearer = [row for row in solved if row[mode] > row[SHARDY] * (1 + TIE)]
        out[mode] = {
            "shardy over ours, geomean": geomean(ratios),
            "max": max(ratios, default=math.nan),
            "ours costs less": sum(row[mode] < row[SHARDY] * (1 - TIE) for row in solved),
            "ours costs more": len(dearer),
            "examples": sorted(dearer, key=lambda row: row[SHARDY] / row[mode])[:20],
        }
    return out


def show_shardy(found: dict[str, dict[str, Any]]) -> None:
    """Print the table of Shardy's pass."""
    heads = ("set, ours", "problems", "solved by shardy", "shardy over ours, geomean", "max", "ours less", "ours more")
    lines = [[f"{name}, {mode}", one["problems"], one["solved by shardy"], *list(one[mode].values())[:-1]]
             for name, one in found.items() for mode in OURS]  # fmt: skip
    print(table(heads, lines, "Shardy's pass: what its plans cost over ours"))
    for one in found.values():
        for mode in OURS:
            for example in one[mode]["examples"][:3]:
                print(f"  {mode} costs more: {example}")


# Summaries.


def against_bound(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """Bytes over the lower bound, rounds and memory of one planner, over the problems that it solves."""
    solved = [r for r in rows if r.bytes_of(name) is not None]
    ratios = [_bytes(r, name) / r.least for r in solved if r.least]
    memory = [r.largest_of(name) / r.bound for r in solved]
    out: dict[str, Any] = {
        "solved": len(solved),
        "wrong or failed": sum(name in r.peers and not r.peers[name].correct for r in rows),
        "not representable": sum(name not in r.peers and name not in r.ours for r in rows),
        "bytes where the bound is 0": sum(_bytes(r, name) > 0 for r in solved if not r.least),
        "geomean": geomean(ratios),
        "max": max(ratios, default=math.nan),
        "share at 1": _share(x == 1 for x in ratios),
        "mean rounds": _mean(r.rounds_of(name) for r in solved),
        "most rounds": max((r.rounds_of(name) for r in solved), default=0),
        "largest/bound geomean": geomean(memory),
        "largest/bound max": max(memory, default=math.nan),
        "share over bound": _share(x > 1 for x in memory),
    }
    if name in OURS:
        out["mean peers"] = _mean(r.ours[name].peers for r in solved)
        out["most peers"] = max(r.ours[name].peers for r in solved)
        out["slow-level bytes / array, mean"] = _mean(r.slow[name] for r in solved)
        out["statuses"] = dict(collections.Counter(r.ours[name].status for r in solved))
    return out


def against_peer(rows: Sequence[Row], ours: str, peer: str) -> dict[str, Any]:
    """Bytes of a peer over ours, and the problems on which the peer costs less."""
    solved = [r for r in rows if r.bytes_of(peer) is not None]
    out: dict[str, Any] = {}
    for key, some in (("all", solved), ("not rematerialised", [r for r in solved if not r.rematerialised])):
        ratios = [_bytes(r, peer) / _bytes(r, ours) for r in some if r.least]
        out[key] = {"count": len(ratios), "geomean": geomean(ratios), "max": max(ratios, default=math.nan)}
    dearer = [r for r in solved if _cost(r, ours) > _cost(r, peer) * (1 + TIE)]
    out["ours costs more"] = len(dearer)
    out["ours costs less"] = sum(_cost(r, ours) < _cost(r, peer) * (1 - TIE) for r in solved)
    out["examples"] = [{"problem": r.text, "ours": _cost(r, ours), "peer": _cost(r, peer)} for r in dearer]
    return out


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """All that is said of a suite."""
    return {
        "problems": len(rows),
        "lower bound 0": sum(not r.least for r in rows),
        "rematerialised by xla": sum(r.rematerialised for r in rows),
        "bytes over lower bound": {name: against_bound(rows, name) for name in (*OURS, *NAMES)},
        "peer over ours": {peer: {ours: against_peer(rows, ours, peer) for ours in OURS} for peer in NAMES},
        "families": {o: {f: sum(r.ours[o].family == f for r in rows) for f in FAMILIES} for o in OURS},
        "above the bound by family": {
            o: dict(collections.Counter(r.ours[o].family for r in rows if r.ours[o].received > r.least)) for o in OURS
        },
    }


def _bytes(row: Row, name: str) -> int:
    got = row.bytes_of(name)
    return 0 if got is None else got


def _cost(row: Row, name: str) -> float:
    got = row.cost_of(name)
    return math.inf if got is None else got


def _share(hits: Iterable[bool]) -> float:
    return _mean(map(float, hits))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.fmean(listed) if listed else math.nan


# Shardy's two failures.


def shardy_failures() -> list[dict[str, Any]]:
    """The two inputs on which the pass ends elsewhere or breaks, with what it does and our plans, run and compared."""
    out: list[dict[str, Any]] = []
    for s, t in single(suites.problems("X", 0, 99)):
        problem = to_peer(s, t)
        if problem is None or s.mesh.size not in (12, 24) or not s.all_even:
            continue
        moves = shardy.plan(problem)
        if moves.correct:
            continue
        entry: dict[str, Any] = {"problem": told(s, t), "shardy": moves.error, "shardy ops": list(moves.ops)}
        for name in OURS:
            plan = sp.redistribute(s, t, portable=name == "portable")
            plan.certificate.check()
            array = np.arange(math.prod(s.shape), dtype=np.float32).reshape(s.shape)
            shards = sp.run(plan.program, sp.distribute(array, s))
            right = all(map(np.array_equal, shards, sp.distribute(array, t)))
            one = facts(plan)
            entry[name] = {"right": right, "ops": list(one.ops), "bytes": one.received, "least": lower_bound(problem),
                           "rounds": one.rounds, "program": str(plan.program).splitlines()}  # fmt: skip
        out.append(entry)
    return out


# The print-out.


def show(suite: str, result: dict[str, Any]) -> None:
    """Print the tables of a suite."""
    columns = ("solved", "wrong or failed", "geomean", "max", "share at 1", "mean rounds", "mean peers",
               "slow-level bytes / array, mean", "largest/bound max", "share over bound")  # fmt: skip
    names = ("solved", "wrong", "geomean", "max", "at 1", "rounds", "peers", "slow", "memory max", "over bound")
    bounds = result["bytes over lower bound"]
    title = f"{suite}: bytes / lower bound of {result['problems']} problems ({result['lower bound 0']} with bound 0)"
    print(table(("planner", *names), ([n, *(b.get(c) for c in columns)] for n, b in bounds.items()), title))
    rows = []
    for peer, both in result["peer over ours"].items():
        for ours, one in both.items():
            kept = one["not rematerialised"]
            rows.append([f"{peer} / {ours}", one["all"]["geomean"], one["all"]["max"], kept["geomean"], kept["max"],
                         one["ours costs less"], one["ours costs more"]])  # fmt: skip
    heads = ("peer / ours", "geomean", "max", "not remat.", "max", "ours less", "ours more")
    print(table(heads, rows, f"{suite}: bytes of peers over ours ({result['rematerialised by xla']} rematerialised)"))
    for both in result["peer over ours"].values():
        for ours, one in both.items():
            for example in one["examples"][:5]:
                print(f"  {ours} costs more: {example}")
    families = result["families"]
    print(table(("family", *OURS), ([f, *(families[o][f] for o in OURS)] for f in FAMILIES), f"{suite}: who won"))


def show_failures(entries: Sequence[dict[str, Any]]) -> None:
    """Print the inputs on which Shardy's pass fails."""
    for entry in entries:
        print(f"\n{entry['problem']}\n  shardy    {entry['shardy'][:200]}")
        for name in OURS:
            one = entry[name]
            word = "right" if one["right"] else "WRONG"
            print(f"  {name:9} {word}: {' | '.join(one['ops'])}; {one['bytes']} bytes, least {one['least']}")


def main() -> None:
    parser = arguments("bytes_vs_peers", "Bytes of our plans, the bound and the peers.", 300, of="problems of s8")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts = {"s8": options.count, "s16": max(1, options.count * 2 // 3)}
    result: dict[str, Any] = {}
    solved: dict[str, list[Row]] = {}
    for suite, count in counts.items():
        solved[suite] = solve(suite, options.seed, count)
        result[suite] = summary(solved[suite])
        show(suite, result[suite])
    sets = {OWN_TESTS: list(own_tests())}
    sets |= {name: list(larger(sizes, options.seed, options.count // 3)) for name, sizes in LARGER.items()}
    result[SHARDY] = {name: against_shardy(name, pairs) for name, pairs in sets.items()}
    show_shardy(result[SHARDY])
    result["shardy failures"] = shardy_failures()
    show_failures(result["shardy failures"])
    result["rows"] = {suite: [r.to_json() for r in rows] for suite, rows in solved.items()}
    write(options.out, record({"seed": options.seed, "counts": counts}, result))


if __name__ == "__main__":
    main()
