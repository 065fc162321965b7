"""A DLRM step on 128 nodes with the embedding all-to-all fused, beside the published 21 %.

The model is that of the DLRM builder under `Strategy(data=N, expert=N)`: MLPs on every node, of every table a part of
the columns on each. The job that `partition` makes is simulated op by op; the fused step is the same job with the bags,
the copy behind them and their all-to-all priced as one op by `hardware.prices.fused`. `fused_dlrm.toml` holds every
assumption with its tag; computation is priced twice, by the costs measured here (one core) and by those recalled of the
published accelerator. Nothing is tuned to the 21 %: what would give it is worked out apart.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, arguments, record, table, write

import shardplan as sp
from shardplan.fused.deciding.trials import shape_work
from shardplan.hardware.prices.fused import TILE_COUNTS, FusedConstants, FusedWork, fused_seconds
from shardplan.hardware.prices.fused_kernels import KernelConstants
from shardplan.hardware.units import parse_seconds
from shardplan.simulation.jobs.job_timeline import JobTimeline
from shardplan.simulation.jobs.timing import COMPUTE, TimedOp
from shardplan.strategy.partition.job import Job
from shardplan.strategy.partition.partition import partition

ASSUMED = Path(__file__).with_suffix(".toml")
PUBLISHED = 0.21
TABLES, WHOLE = (16, 32, 64, 128, 256, 512, 1024), 256
DEVICES = ("measured", "accelerator")
TORUS = {8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}

Facts = Mapping[str, Any]


def assumptions(path: Path = ASSUMED) -> dict[str, dict[str, Any]]:
    """Every assumption: value, tag, why, and the values that are tried beside it."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What a result file measured: bags and products, tax of tiles, seconds of a signal."""

    bags: KernelConstants
    product: KernelConstants
    signal: float
    tile_tax: tuple[tuple[int, float], ...]

    @classmethod
    def load(cls, path: Path, taxes_path: Path) -> MeasuredCosts:
        """Read the calibration of a result file, and the tax of tiles of another one."""
        constants = FusedConstants.parse(json.loads(path.read_text(encoding="utf-8"))["tables"][0]["constants"])
        data = json.loads(taxes_path.read_text(encoding="utf-8"))
        bags, product = constants.kernel("bags"), constants.kernel("product")
        assert bags is not None
        assert product is not None
        taxes = tuple((int(n), e) for n, e in data["tile_tax"]["embedding"])
        return cls(bags, product, constants.of_kind("bags").signal, taxes)


def device(facts: Facts, which: str, costs: MeasuredCosts) -> tuple[str, str]:
    """FLOP/s and B/s of a device, as a topology says them."""
    if which == "accelerator":
        return facts["accelerator_flops"], facts["accelerator_memory"]
    product = shape_work(("product", (facts["batch"], facts["mlp_width"], facts["mlp_width"])))
    bags = shape_work(("bags", (facts["tables"], facts["batch"], facts["pooling"], facts["dim"])))
    flops, rate = product[0] / costs.product.fused.seconds(*product), bags[1] / costs.bags.fused.seconds(*bags)
    return f"{flops / 1e12:.9g} TFLOP/s", f"{rate / 1e9:.9g} GB/s"


def topology(facts: Facts, flops: str, memory: str) -> sp.Topology:
    """The nodes and their links."""
    shape = f"shape = {list(TORUS[facts['nodes']])}\n" if facts["link"] == "torus" else ""
    return sp.Topology.parse(
        f'version = 1\nname = "dlrm"\n[device]\nflops = {{ f32 = "{flops}" }}\nmemory = "4 TB"\n'
        f'memory_bandwidth = "{memory}"\n[[levels]]\nname = "node"\nsize = {facts["nodes"]}\nlink = "{facts["link"]}"\n'
        f'{shape}bandwidth = "{facts["bandwidth"]}"\nlatency = "{facts["latency"]}"\nsource = "fused_dlrm.toml"\n'
    )


SHAPE = ("nodes", "tables", "dim", "pooling", "batch", "mlp_layers", "mlp_width", "rows", "bucket", "link")


@lru_cache(maxsize=64)
def job_of(*values: Any) -> Job:
    """The job of a model on so many nodes, planned for the links' kind and not for their figures."""
    facts = dict(zip(SHAPE, values, strict=True))
    width, dim = facts["mlp_width"], facts["dim"]
    model = sp.Model.load(
        "dlrm", dense_features=width, embedding_dim=dim, table_rows=[facts["rows"]] * facts["tables"],
        bottom=[width] * 3 + [dim], top=[width] * (facts["mlp_layers"] - 5) + [1], bag=facts["pooling"],
    )  # fmt: skip
    n = facts["nodes"]
    strategy = sp.Strategy(
        data=n, expert=n, global_batch=facts["batch"] * n, microbatch=facts["batch"], bucket=facts["bucket"],
    )  # fmt: skip
    plain = {"bandwidth": "25 GB/s", "latency": "700 ns"}
    return partition(model, strategy, topology({**facts, **plain}, "20 TFLOP/s", "1 TB/s"))


@lru_cache(maxsize=4)
def simulated(network: sp.Topology, *values: Any) -> JobTimeline:
    """The step of such a job on a network."""
    line = sp.simulate(job_of(*values), network)
    assert isinstance(line, JobTimeline)
    return line


class Pair:
    """The ops of a step that a fused one replaces: what computes, what copies, what moves."""

    def __init__(self, line: JobTimeline) -> None:
        forward, backward = (_nodes(line, kind) for kind in "FB")
        self.bags = [op for op in forward if op.cost.kind == "embedding_bag"]
        made = {name for op in self.bags for name in op.results}
        for op in forward:  # views of bags
            if op.cost.kind in ("expand", "reshape") and made.issuperset(op.reads):
                made |= set(op.results)
        self.copies = [op for op in forward if len(made & set(op.reads)) == len(self.bags) > 1]
        self.moves = _chain(forward, set(self.copies[0].results))
        self.scatters = [op for op in backward if any(r.startswith("next.gradient.tables.") for r in op.results)]
        self.back = _back(backward, {r for op in self.scatters for r in op.reads if not r.startswith("sparse.")})
        program = line.job.programs.shared[line.job.programs.which[0, "F"]]
        self.nbytes = program.types[self.copies[0].results[0]].local_bytes()

    def work(self, ranks: int, scale: float = 1.0) -> FusedWork:
        return FusedWork(scale * sum(op.cost.seconds for op in self.bags), scale * self.nbytes, ranks)


def _nodes(line: JobTimeline, kind: str) -> list[TimedOp]:
    return [op for op in line.compiled.maps[0, kind].nodes if isinstance(op, TimedOp)]


def _chain(ops: Sequence[TimedOp], names: set[str]) -> list[TimedOp]:
    """Communication that begins with these values, one op behind the other."""
    found: list[TimedOp] = []
    for op in ops:
        if op.cost.stream != COMPUTE and names & set(op.reads):
            found.append(op)
            names |= set(op.results)
    return found


def _back(ops: Sequence[TimedOp], names: set[str]) -> list[TimedOp]:
    """The last communication that these values come from, one op behind the other."""
    found: list[TimedOp] = []
    for op in reversed(ops):
        if names & set(op.results) and (op.cost.stream != COMPUTE or not found):
            names |= set(op.reads)
            found += [op] if op.cost.stream != COMPUTE else []
    return found[::-1]


def replayed(line: JobTimeline, seconds: Callable[[TimedOp], float]) -> tuple[float, dict[str, float]]:
    """The step with other seconds for some ops, and its critical path by kind of op.

    Ops run in order, each on its stream, when what they read is there; what an earlier pass has made is there when all
    of that pass is. With each op's own seconds it is what `sp.simulate` says (a test compares them).
    """
    free: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, -1))
    rows: list[tuple[TimedOp, float, int]] = []  # op, end, the row that it waited for
    passed = (0.0, -1)
    for kind in ("F", "B", "OPT"):
        earlier = set(line.compiled.maps[0, kind].earlier)
        ready: dict[str, tuple[float, int]] = {}
        last = passed
        for op in _nodes(line, kind):
            waits = [ready.get(name, passed if name in earlier else (0.0, -1)) for name in op.reads]
            if op.issued:
                waits.append(free[op.cost.stream])
            if kind == "OPT":
                waits.append(passed)
            start, cause = max(waits, default=(0.0, -1))
            end = start + seconds(op)
            rows.append((op, end, cause))
            mark = end, len(rows) - 1
            if op.issued:
                free[op.cost.stream] = mark
            ready |= dict.fromkeys(op.results, mark)
            last = max(last, mark)
        passed = last
    path: dict[str, float] = defaultdict(float)
    at = passed[1]
    while at >= 0:
        op, end, cause = rows[at]
        path[op.cost.kind] += end - (rows[cause][1] if cause >= 0 else 0.0)
        at = cause
    return passed[0], dict(sorted(path.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class Step:
    """A step unfused and fused, and how its pair is priced."""

    unfused: float
    fused: float
    tiles: int
    pair: tuple[float, float, float]  # bags, all-to-all, both fused
    paths: tuple[dict[str, float], dict[str, float]]

    @property
    def reduction(self) -> float:
        return 1 - self.fused / self.unfused


def constants_of(
    facts: Facts, which: str, costs: MeasuredCosts, pair: Pair, moves: Sequence[TimedOp]
) -> FusedConstants:
    """The price's numbers: the wire takes as long as the simulated all-to-all."""
    latency = parse_seconds(facts["latency"])
    wire = max(sum(op.cost.seconds for op in moves) - latency, 1e-12)
    ranks = facts["nodes"]
    signal = parse_seconds(facts["signal"]) if which == "accelerator" else costs.signal
    taxes = tuple((n, max(1.0, 1 + (e - 1) * facts["tax"]) if n > 1 else 1.0) for n, e in costs.tile_tax)
    return FusedConstants("dlrm", latency, pair.nbytes * (ranks - 1) / ranks / wire, math.inf, signal, taxes)


def step(facts: Facts, which: str, costs: MeasuredCosts, scale: float = 1.0) -> Step:
    """A step, with the pair's work `scale` times as much."""
    line = simulated(topology(facts, *device(facts, which, costs)), *(facts[name] for name in SHAPE))
    pair = Pair(line)
    scaled = {id(op) for op in (*pair.bags, *pair.copies, *pair.moves, *pair.scatters, *pair.back)}
    ids = {id(op) for kind in "FB" for op in _nodes(line, kind) if any(r.startswith("sparse.") for r in op.results)}
    hidden = {id(op) for op in _nodes(line, "OPT") if op.cost.stream != COMPUTE or op.cost.kind == "together"}

    def own(op: TimedOp) -> float:
        gone = (id(op) in ids and facts["ids"] == "free") or (id(op) in hidden and facts["gradients"] == "hidden")
        return 0.0 if gone else op.cost.seconds * (scale if id(op) in scaled else 1.0)

    made = constants_of(facts, which, costs, pair, pair.moves)
    work = pair.work(facts["nodes"], scale)
    counts = (facts["tiles"],) if facts["tiles"] else TILE_COUNTS
    tiles = min(counts, key=lambda n: float(fused_seconds(work, n, made)))
    together = float(fused_seconds(work, tiles, made))
    other = {id(op): 0.0 for op in (*pair.bags, *pair.copies, *pair.moves)} | {id(pair.bags[-1]): together}
    if facts["backward_fused"]:
        back = FusedWork(scale * sum(op.cost.seconds for op in pair.scatters), work.nbytes, facts["nodes"])
        seconds = float(fused_seconds(back, tiles, constants_of(facts, which, costs, pair, pair.back)))
        other |= {id(op): 0.0 for op in (*pair.back, *pair.scatters)} | {id(pair.scatters[-1]): seconds}
    unfused, before = replayed(line, own)
    fused, after = replayed(line, lambda op: other.get(id(op), own(op)))
    moves = sum(map(own, pair.moves))
    return Step(unfused, fused, tiles, (float(work.seconds), moves, together), (before, after))


def by_tables(facts: Facts, which: str, costs: MeasuredCosts) -> list[dict[str, Any]]:
    """The reduction by the number of tables, with gradients reduced after the backward pass, and hidden.

    As the builder has it, whose top MLP reads a number for every two tables, so that beyond `WHOLE` it is most of the
    step; and with the work of the tables alone so many times that of the assumed ones, the MLPs as they are.
    """
    rows: list[dict[str, Any]] = []
    for tables in TABLES:
        row: dict[str, Any] = {"tables": tables}
        for gradients in ("after", "hidden"):
            if tables <= WHOLE:
                whole = step({**facts, "tables": tables, "gradients": gradients}, which, costs)
                row |= {f"gradients {gradients}": whole.reduction, f"unfused, gradients {gradients}": whole.unfused}
            alone = step({**facts, "gradients": gradients}, which, costs, tables / facts["tables"])
            row[f"tables alone, gradients {gradients}"] = alone.reduction
        rows.append(row)
    return rows


def sensitivity(facts: Facts, which: str, costs: MeasuredCosts) -> list[dict[str, Any]]:
    """One factor at a time, and both corners: all factors where each alone gives least, and most."""
    rows: list[dict[str, Any]] = []
    corners: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for name, each in assumptions().items():
        if which == "measured" and name in ("signal", "accelerator_flops", "accelerator_memory"):
            continue
        tried: dict[str, Step] = {}
        for value in each.get("tries", ()):
            try:
                tried[json.dumps(value)] = step({**facts, name: value}, which, costs)
            except sp.LayoutError as error:  # such as more nodes than a table has columns
                rows.append({"factor": name, "value": value, "refused": str(error)})
        rows += [{"factor": name, "value": json.loads(v), "reduction": s.reduction, "unfused": s.unfused,
                  "fused": s.fused} for v, s in tried.items()]  # fmt: skip
        everything = {json.dumps(facts[name]): step(facts, which, costs), **tried} if tried else {}
        if everything and name not in ("nodes", "link", "tiles"):
            ordered = sorted(everything, key=lambda v: everything[v].reduction)
            corners[0][name], corners[1][name] = json.loads(ordered[0]), json.loads(ordered[-1])
    for word, corner in zip(("least", "most"), corners, strict=True):
        found = step({**facts, **corner}, which, costs)
        rows.append({"factor": f"corner: {word}", "value": corner, "reduction": found.reduction,
                     "unfused": found.unfused, "fused": found.fused})  # fmt: skip
    return rows


def needed(facts: Facts, which: str, costs: MeasuredCosts) -> dict[str, Any]:
    """How many times the bags and their all-to-all would have to be what they are for the published reduction."""
    told = {name: facts[name] for name in ("ids", "gradients", "backward_fused", "tax")}
    most, at = max((step(facts, which, costs, 2.0**k).reduction, 2.0**k) for k in range(-4, 24))
    found: dict[str, Any] = {**told, "reduction": step(facts, which, costs).reduction, "most": most, "most at": at}
    found["times"] = None
    if most >= PUBLISHED:
        low, high = 1e-3, at
        for _ in range(40):
            middle = math.sqrt(low * high)
            enough = step(facts, which, costs, middle).reduction >= PUBLISHED
            low, high = (low, middle) if enough else (middle, high)
        found["times"] = high
    return found


def main() -> None:
    parser = arguments("fused_dlrm", __doc__ or "", 0, of="unused")
    options = parser.parse_args()
    assumed = assumptions()
    facts = {name: each["value"] for name, each in assumed.items()}
    costs = MeasuredCosts.load(RESULTS / facts["costs"], RESULTS / facts["taxes"])
    lines: list[list[Any]] = []
    steps: list[dict[str, Any]] = []
    for which in DEVICES:
        for link in ("torus", "switch"):
            found = step({**facts, "link": link}, which, costs)
            bags, moves, together = found.pair
            lines.append([which, link, *(1e3 * x for x in (found.unfused, found.fused, bags, moves, together)),
                          found.tiles, f"{100 * found.reduction:.2f} %", f"{100 * PUBLISHED:.0f} %"])  # fmt: skip
            steps.append({"device": which, "link": link, "unfused": found.unfused, "fused": found.fused,
                          "reduction": found.reduction, "published": PUBLISHED, "tiles": found.tiles, "bags": bags,
                          "all-to-all": moves, "pair fused": together, "path unfused": found.paths[0],
                          "path fused": found.paths[1]})  # fmt: skip
    heads = (
        "device",
        "link",
        "unfused ms",
        "fused ms",
        "bags",
        "all-to-all",
        "pair fused",
        "n",
        "reduction",
        "published",
    )
    print(table(heads, lines, f"DLRM step on {facts['nodes']} nodes"))
    for each in steps:
        told = ", ".join(
            f"{kind} {100 * s / each['unfused']:.0f} %" for kind, s in list(each["path unfused"].items())[:5]
        )
        print(f"{each['device']}, {each['link']}: critical path unfused: {told}")
    curve = by_tables(facts, "accelerator", costs)
    keys = [f"{of}gradients {g}" for of in ("", "tables alone, ") for g in ("after", "hidden")]
    cells = [[r["tables"], *(f"{100 * r[key]:.1f}" if key in r else "" for key in keys)] for r in curve]
    print(table(("tables", *keys), cells, "less by tables, in %, accelerator, torus"))
    rows = {which: sensitivity(facts, which, costs) for which in DEVICES}
    for which, each in rows.items():
        cells = [
            [r["factor"], str(r["value"])[:40], 1e3 * r["unfused"], 1e3 * r["fused"], f"{100 * r['reduction']:.2f}"]
            for r in each
            if "refused" not in r
        ]
        print(
            table(("factor", "value", "unfused ms", "fused ms", "reduction %"), cells, f"sensitivity, {which}, torus")
        )
    others: tuple[dict[str, Any], ...] = ({"ids": "gathered"}, {}, {"gradients": "hidden"},
        {"gradients": "hidden", "backward_fused": True}, {"gradients": "hidden", "tax": 0.0})  # fmt: skip
    asked = [{"device": which, **needed({**facts, **other}, which, costs)} for which in DEVICES for other in others]
    print()
    for each in asked:
        under = ", ".join(f"{name} {each[name]}" for name in ("ids", "gradients", "backward_fused", "tax"))
        most = f"no amount does (at most {100 * each['most']:.1f} %, at {each['most at']:g} times)"
        times = f"{each['times']:.3g} times the table work gives 21 %" if each["times"] else most
        print(f"{each['device']}, torus, {under}: {100 * each['reduction']:.2f} %; {times}")
    read = {name: json.loads((RESULTS / facts[name]).read_text(encoding="utf-8")) for name in ("costs", "taxes")}
    origins = {name: {k: each[k] for k in ("date", "commit")} for name, each in read.items()}
    head = {"assumed": assumed, "costs of": origins,
            "constants": read["costs"]["tables"][0]["constants"]}  # fmt: skip
    write(options.out, record(head, {"steps": steps, "by tables": curve, "sensitivity": rows,
                                     "what would give it": asked}))  # fmt: skip


if __name__ == "__main__":
    main()
