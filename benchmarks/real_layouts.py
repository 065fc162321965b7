"""Moves of real training and serving jobs (suite R): ops, bytes, rounds and predicted seconds on shipped clusters.

`python -m benchmarks.real_layouts [--count 99]`. Each move is planned without a topology (least bytes) and on two
topologies with as many nodes as its devices need (there the plan is the cheapest in predicted seconds, a model's and no
measurement). Peers plan the single arrays on 8 to 32 devices, DTensor on at most 16. The last rows are moves of the
suite at 16 devices.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import arguments, listed, record, table, timed, to_peer, told, write
from benchmarks.peers import dtensor, shardy, xla
from benchmarks.peers.problem import Moves, Problem

import shardplan as sp
from benchmarks import suites

TOPOLOGIES = ("dgx-a100", "dgx-h100")
PER_NODE = 8
MOST_DEVICES = 32
PEERS: dict[str, Callable[[Problem], Moves | None]] = {
    "shardy pass": shardy.plan,
    "dtensor greedy": lambda p: dtensor.plan(p, "greedy") if p.devices <= 16 else None,
    "dtensor min-cost": lambda p: dtensor.plan(p, "min-cost") if p.devices <= 16 else None,
}
SIXTEEN = (
    ("dp=2, tp=8", "bf16[8192@(dp,tp), 28672]", "bf16[8192, 28672@tp]"),
    ("dp=2, tp=8", "bf16[8192@dp, 28672@tp]", "bf16[8192@tp, 28672@dp]"),
    ("data=2, cp=8", "bf16[8@data, 32768@cp, 64, 128]", "bf16[8@data, 32768, 64@cp, 128]"),
    ("ep=8, tp=2", "bf16[64@ep, 4096, 14336@tp]", "bf16[64@tp, 4096, 14336@ep]"),
)


@dataclass(frozen=True, slots=True)
class Move:
    """One request, and its name in the tables."""

    name: str
    sources: list[sp.TensorType]
    targets: list[sp.TensorType]
    batch: bool

    def plan(self, topology: sp.Topology | None) -> tuple[sp.Plan, float]:
        """The plan, and the seconds that planning took."""
        if self.batch:
            return timed(lambda: sp.redistribute(self.sources, self.targets, topology=topology))
        return timed(lambda: sp.redistribute(self.sources[0], self.targets[0], topology=topology))

    @property
    def nodes(self) -> int:
        """The nodes that hold all of its devices."""
        most = max(max(t.mesh.devices) for t in (self.sources[0], self.targets[0]))
        return -(-(most + 1) // PER_NODE)


def moves(count: int) -> Iterator[Move]:
    """Yield the moves of the suite (R0, ..), then those at 16 devices (S0, ..)."""
    for k, (s, t, _) in enumerate(suites.problems("R", 0, count)):
        batch, sources, targets = isinstance(s, list), listed(s), listed(t)
        first = f"{len(sources)} tensors" if batch else f"{sources[0]} -> {targets[0]}"
        yield Move(f"R{k} {first}, {_meshes(sources[0].mesh, targets[0].mesh)}", sources, targets, batch)
    for k, (mesh_text, source, target) in enumerate(SIXTEEN):
        mesh = sp.Mesh.parse(mesh_text)
        s, t = (sp.TensorType.parse(text, mesh) for text in (source, target))
        yield Move(f"S{k} {s} -> {t}, {_meshes(mesh, mesh)}", [s], [t], False)


def _meshes(a: sp.Mesh, b: sp.Mesh) -> str:
    """How the devices of two meshes relate."""
    if a == b:
        return f"on {','.join(f'{n}={k}' for n, k in a.shape.items())}"
    common = len(set(a.devices) & set(b.devices))
    if common == a.size == b.size:
        how = "same devices" if a.devices == b.devices else "same devices, another order"
    else:
        how = f"{common} devices in common" if common else "disjoint devices"
    return f"{a.size} -> {b.size}: {how}"


def planned(move: Move, topology: sp.Topology | None) -> dict[str, Any]:
    """A plan in numbers."""
    plan, planning = move.plan(topology)
    certificate = plan.certificate
    certificate.check()
    ops = collections.Counter(step.op.name for step in plan.program.steps)
    least = max(certificate.lower_bound_bytes)
    return {
        "ops": " + ".join(f"{n} {name}" if n > 1 else name for name, n in ops.items()) or "nothing",
        "bytes": max(certificate.received_bytes),
        "bytes / bound": max(certificate.received_bytes) / least if least else None,
        "rounds": certificate.rounds,
        "peak / bound": certificate.peak_bytes / certificate.bound_bytes,
        "seconds": plan.seconds,
        "least seconds": certificate.lower_bound_seconds,
        "level bytes": certificate.level_bytes,
        "status": certificate.status,
        "planning seconds": planning,
        "program": str(plan.program).splitlines() if len(plan.program.steps) <= 8 and not move.batch else None,
    }


def asked_peers(move: Move) -> dict[str, Any]:
    """The bytes of the peers, where they can say the move."""
    problem = None if move.batch else to_peer(move.sources[0], move.targets[0])
    if problem is None or not 8 <= problem.devices <= MOST_DEVICES:
        return {}
    found = {name: peer(problem) for name, peer in PEERS.items()} | {"xla": xla.plan_many([problem])[0]}
    out: dict[str, Any] = {}
    for name, answer in found.items():
        if answer is None:
            continue
        out[name] = {"error": answer.error[:160]} if not answer.correct else {
            "bytes": answer.received_total_worst(), "rounds": answer.rounds_total(), "largest": answer.largest,
            "ops": " | ".join(answer.ops), "rematerialised": answer.rematerialised}  # fmt: skip
    return out


def solve(move: Move) -> dict[str, Any]:
    """A move on every topology and by every peer."""
    problem = told(move.sources[0], move.targets[0]) if not move.batch else told(move.sources, move.targets)
    row: dict[str, Any] = {"name": move.name, "problem": problem, "without topology": planned(move, None)}
    for name in TOPOLOGIES:
        row[name] = {"nodes": move.nodes} | planned(move, sp.Topology.load(name, nodes=move.nodes))
    return row | {"peers": asked_peers(move)}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the tables."""
    for row in rows:
        print(f"{row['name']}\n    {row['without topology']['ops']}")
    lines = [
        [row["name"].split()[0], *(row["without topology"][k] for k in ("bytes", "bytes / bound", "rounds", "status")),
         *(1e3 * row[name][k] for name in TOPOLOGIES for k in ("seconds", "least seconds")),
         *(row[name]["level bytes"][0] for name in TOPOLOGIES)]
        for row in rows
    ]  # fmt: skip
    names = [f"{name} {word}" for name in TOPOLOGIES for word in ("ms", "least")]
    heads = ("move", "bytes", "/bound", "rounds", "status", *names, *(f"{name} between nodes" for name in TOPOLOGIES))
    print(table(heads, lines, "moves of real jobs (seconds are predictions)"))
    peers = ["xla", *PEERS]
    compared: list[list[Any]] = []
    for row in rows:
        if answers := row["peers"]:
            theirs = [answers.get(p, {}).get("bytes") for p in peers]
            largest = answers.get("xla", {}).get("largest")
            compared.append([row["name"].split()[0], row["without topology"]["bytes"], *theirs, largest])
    print(table(("move", "ours", *peers, "xla largest"), compared, "bytes at the worst device, peers beside"))


def main() -> None:
    parser = arguments("real_layouts", "Moves of real jobs: ops, bytes, rounds, seconds.", 99, of="moves of the suite")
    options = parser.parse_args()
    rows = [solve(move) for move in moves(options.count)]
    show(rows)
    write(options.out, record({"count": len(rows), "topologies": TOPOLOGIES}, {"rows": rows}))


if __name__ == "__main__":
    main()
