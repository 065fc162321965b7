"""PyTorch's operator database on DTensors, with our moves in the place of DTensor's own, beside DTensor as it is.

`python -m benchmarks.operators --ranks 4` (or 8): every operator that runs on the CPU, `--count` cases each, on gloo
ranks of this machine. A case is a sample input of the database whose tensors lie on a random mesh by random placements
(uneven, in any order of the mesh dims, partial). The operator, its gathered results, its gradient and the gathered
gradients are computed twice in the same processes, with DTensor's redistribution and with ours in its place, and
compared bit for bit: placements and local tensors; sums of floats to rounding. Every case also moves its inputs to
random placements, and `--orders` more cases move a tensor between all orders of sharding. Plain tensors say where
DTensor itself is wrong. A case that ends or stops a rank loses only itself; a verdict against ours is confirmed on
fresh ranks. `--only NAME ...` takes some operators; results so far are kept in a file beside `--out` and taken up again
with `--resume`.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Progress, arguments, record, table, write
from benchmarks.operator_cases import INPUTS, MESHES, OPERATOR, ORDERS, Case, database, named
from benchmarks.operator_groups import GRACE, PATIENCE, Broken, Group
from benchmarks.operator_ways import OURS, STEPS, STOCK, Answers, Failed

LIFE = 400  # cases that a group of ranks may answer
VERDICTS = (
    "equal", "rounding", "differs", "ours refuses", "refuses what is wrong", "fail alike", "fail otherwise",
    "ours does more", "stock breaks", "no such case",
)  # fmt: skip
AGAINST = ("differs", "ours refuses")
NO_SUM = "no partial tensor was moved"


@dataclass(slots=True)
class End:
    """How far a way came: the steps done, and how it failed in the next."""

    steps: int
    kind: str = ""  # of the error; "" where none
    text: str = ""
    even: bool = True  # whether all ranks answered alike, so that they may be asked on


@dataclass(slots=True)
class Found:
    """What came of a case."""

    case: Case
    about: str
    verdict: str
    steps: int = 0
    lines: list[str] = field(default_factory=list)
    stock_wrong: list[str] = field(default_factory=list)
    moves: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    doubt: bool = False  # whether the ranks may be out of step


class Ranks:
    """A group that is made anew when it is worn out or in doubt."""

    def __init__(self, world: int, verbose: bool):
        self.world, self.verbose, self.starts, self.age, self.grace = world, verbose, 0, 0, GRACE
        self.group: Group | None = None

    def get(self) -> Group:
        """The group to ask next."""
        if self.group is None or self.age >= LIFE:
            self.drop()
            self.group = Group(self.world, Answers, self.grace, self.verbose)
            self.starts, self.age = self.starts + 1, 0
        self.age += 1
        return self.group

    def drop(self) -> None:
        """Ask this group no more."""
        if self.group is not None:
            self.group.close()
        self.group = None


def run(ranks: Ranks, case: Case) -> Found:
    """Run a case either way, and judge it."""
    started = time.monotonic()
    group = ranks.get()
    try:
        about = group.ask(("draw", case))[0]
    except Broken as error:
        about = Failed("Broken", error.why)
        ranks.drop()
    if about is None or isinstance(about, Failed):
        return Found(case, "", "no such case", lines=[f"{about.kind}: {about.text}"] if about else [])
    stock = steps(group, STOCK)
    found = Found(case, about, "stock breaks", stock.steps, [told(stock)])
    if stock.even:
        try:
            beside(found, group, stock)
        except Broken as error:
            found.verdict, found.lines = "ours refuses", [f"ours: {error.why}"]
    if found.doubt or not stock.even:
        ranks.drop()
    found.seconds = time.monotonic() - started
    return found


def beside(found: Found, group: Group, stock: End) -> None:
    """Run the case our way, and hold it beside what stock came to."""
    found.doubt = True
    found.stock_wrong = lines_of(group.ask(("wrong", STOCK)))[:3]
    ours = steps(group, OURS)
    found.verdict, found.steps = verdict(stock, ours), ours.steps
    found.lines = [f"ours: {told(ours)}", f"stock: {told(stock)}"] if stock.kind or ours.kind else []
    if ours.even:
        judge(found, group, min(stock.steps, ours.steps))
    if found.verdict == "ours refuses" and found.stock_wrong:
        found.verdict = "refuses what is wrong"
        found.lines.append(f"stock is wrong: {found.stock_wrong[0]}")
    found.doubt = not ours.even or ours.kind not in ("", stock.kind)


def steps(group: Group, way: str) -> End:
    """Take the steps one way until the ranks fail."""
    for k, step in enumerate(STEPS):
        try:
            answers = group.ask(("step", way, step), lambda answer: answer is not None)
        except Broken as error:
            failed = next((a for a in error.answers.values() if isinstance(a, Failed)), None)
            return End(k, failed.kind if failed else "Broken", f"{failed.text if failed else ''} ({error.why})", False)
        bad = [a for a in answers if a is not None]
        if bad:
            return End(k, bad[0].kind, bad[0].text, len(bad) == group.world and len({a.kind for a in bad}) == 1)
    return End(len(STEPS))


def told(end: End) -> str:
    return f"{STEPS[end.steps]}: {end.kind}: {end.text}" if end.kind else "does it"


def verdict(stock: End, ours: End) -> str:
    """The verdict as far as errors tell."""
    if ours.steps < stock.steps:
        return "ours refuses"
    if ours.steps > stock.steps:
        return "ours does more"
    if not ours.kind:
        return "equal"
    return "fail alike" if ours.kind == stock.kind else "fail otherwise"


def judge(found: Found, group: Group, done: int) -> None:
    """Compare what both ways did, and ours with plain tensors."""
    said: dict[str, list[str]] = defaultdict(list)
    for rank, answer in enumerate(group.ask(("judge", done))):
        if isinstance(answer, Failed):
            said["differs"].append(f"rank {rank}: no comparison: {answer.kind}: {answer.text}")
            continue
        for kind in ("differs", "rounding", "wrong"):
            said[kind] += [f"rank {rank}: {line}" for line in answer[kind]]
        if rank == 0:
            found.moves = Counter(answer["moves"])
    wrong = said["wrong"]
    if said["differs"]:
        right = found.stock_wrong and not wrong
        found.verdict = "ours does more" if right else "differs"
        found.lines = [f"stock is wrong, ours is not: {found.stock_wrong[0]}"] if right else said["differs"][:4]
    elif wrong and not found.stock_wrong:
        found.verdict, found.lines = "differs", wrong[:4]
    elif said["rounding"] and found.verdict == "equal":
        found.verdict, found.lines = "rounding", said["rounding"][:2]
        if not any("P" in kind.partition("->")[0] for kind in found.moves):
            found.lines.insert(0, NO_SUM)


def lines_of(answers: list[Any]) -> list[str]:
    """What the ranks say, with the rank; a failure to say it too."""
    return [
        f"rank {rank}: {line}"
        for rank, answer in enumerate(answers)
        for line in ([f"{answer.kind}: {answer.text}"] if isinstance(answer, Failed) else answer)
    ]


def cases(world: int, count: int, orders: int, seed: int, only: set[str]) -> list[list[Case]]:
    """All cases, an operator's together; operators whose names are not wanted are left out."""
    meshes = len(MESHES[world])
    out: list[list[Case]] = []
    for k, op in enumerate(database()):
        if only and named(op) not in only:
            continue
        out.append(
            [
                Case(kind, k, n, (n + k) % meshes, f"{seed}")
                for n in range(count)
                for kind in (OPERATOR, INPUTS)
            ]
        )  # fmt: skip
    return out + [[Case(ORDERS, m, n, m, f"{seed}") for n in range(orders)] for m in range(meshes) if orders]


def name_of(case: Case, world: int) -> str:
    return f"orders on {MESHES[world][case.mesh]}" if case.kind == ORDERS else named(database()[case.operator])


def measure(
    world: int, todo: list[list[Case]], kept: Path, resume: bool, verbose: bool
) -> tuple[list[dict[str, Any]], int]:
    """Run all cases; one row an operator, kept in a file on the way. Also how many groups of ranks were started."""
    rows = [json.loads(x) for x in kept.read_text(encoding="utf-8").splitlines()] if resume and kept.exists() else []
    done = {row["name"] for row in rows}
    progress = Progress("operators", len(todo))
    ranks = Ranks(world, verbose)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("a" if resume else "w", encoding="utf-8") as file:
        for group in todo:
            name = name_of(group[0], world)
            if name not in done:
                row = row_of(name, [confirmed(ranks, case) for case in group])
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
            progress.add(1, name)
    ranks.drop()
    return rows, ranks.starts


def confirmed(ranks: Ranks, case: Case) -> Found:
    """Run a case; once more on fresh ranks where it speaks against ours."""
    found = run(ranks, case)
    if found.verdict in AGAINST:
        ranks.drop()
        ranks.grace = 8 * GRACE  # slow ranks are no fault
        found = run(ranks, case)
        ranks.drop()
        ranks.grace = GRACE
    return found


def row_of(name: str, found: list[Found]) -> dict[str, Any]:
    """The cases of an operator in one row."""
    row: dict[str, Any] = {"name": name, "cases": len(found)}
    row["verdicts"] = Counter(f.verdict for f in found)
    row["operator"] = Counter(f.verdict for f in found if f.case.kind == OPERATOR)
    row["gradients"] = sum(f.steps == len(STEPS) for f in found)
    row["moves"] = sum((f.moves for f in found), Counter[str]())
    row["seconds"] = sum(f.seconds for f in found)
    row["told"] = [
        {"verdict": f.verdict, "case": asdict(f.case), "about": f.about, "lines": f.lines, "moves": f.moves}
        for f in found
        if f.lines and (f.verdict != "rounding" or f.lines[0] == NO_SUM)
    ]
    row["stock wrong"] = [f"{f.case.kind} {f.about}: {f.stock_wrong[0]}" for f in found if f.stock_wrong]
    return row


def without_numbers(text: str) -> str:
    return re.sub(r"\d+", "N", text)[:160]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all rows, and every line that matters."""
    ops = [r for r in rows if not r["name"].startswith("orders on ")]
    ran = [r for r in ops if r["operator"].get("equal", 0) + r["operator"].get("rounding", 0)]
    moves = sum((Counter(r["moves"]) for r in rows), Counter[str]())
    reasons: dict[str, dict[str, list[str]]] = {v: defaultdict(list) for v in VERDICTS}
    for row in rows:
        for told_ in row["told"]:
            for line in told_["lines"][-1:]:
                reasons[told_["verdict"]][without_numbers(line)].append(row["name"])
    return {
        "operators": len(ops),
        "operators that DTensor runs": len(ran),
        "operators without a sample that DTensor holds": [
            r["name"] for r in ops if set(r["operator"]) <= {"no such case"}
        ],
        "operators in which a move of ours ran": sum(bool(r["moves"]) for r in ops),
        "cases": sum(r["cases"] for r in rows),
        "verdicts": {v: sum(r["verdicts"].get(v, 0) for r in rows) for v in VERDICTS},
        "cases with all four steps": sum(r["gradients"] for r in rows),
        "moves of ours": sum(moves.values()),
        "kinds of moves": len(moves),
        "against ours": [{"name": r["name"]} | t for r in rows for t in r["told"] if t["verdict"] in AGAINST],
        "rounding though no partial tensor was moved": [
            f"{r['name']} {t['about']}: {t['lines'][1]}" for r in rows for t in r["told"] if t["lines"][0] == NO_SUM
        ],
        "refuses what is wrong": {k: Counter(v) for k, v in reasons["refuses what is wrong"].items()},
        "ours does more": {k: Counter(v) for k, v in reasons["ours does more"].items()},
        "stock breaks": {k: Counter(v) for k, v in reasons["stock breaks"].items()},
        "fail alike": {k: sorted(set(v)) for k, v in reasons["fail alike"].items()},
        "fail otherwise": {k: sorted(set(v)) for k, v in reasons["fail otherwise"].items()},
        "no such case": {k: sorted(set(v)) for k, v in reasons["no such case"].items()},
        "stock is wrong": {r["name"]: r["stock wrong"] for r in rows if r["stock wrong"]},
    }


def main() -> None:
    parser = arguments("operators", (__doc__ or "").splitlines()[0], 3, of="cases an operator")
    parser.add_argument("--ranks", type=int, default=4, choices=sorted(MESHES))
    parser.add_argument("--orders", type=int, default=300, help="moves between orders of sharding, a mesh")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="names of operators")
    parser.add_argument("--resume", action="store_true", help="go on where a run that ended left off")
    parser.add_argument("--verbose", action="store_true", help="show what the ranks print")
    parser.set_defaults(out=None)
    given = parser.parse_args()
    out = given.out or RESULTS / f"operators_{given.ranks}.json"
    kept = out.with_suffix(".rows")
    started = time.monotonic()
    todo = cases(given.ranks, given.count, given.orders, given.seed, set(given.only))
    rows, starts = measure(given.ranks, todo, kept, given.resume, given.verbose)
    result = summary(rows)
    seconds = time.monotonic() - started
    print(table(["verdict", "cases"], list(result["verdicts"].items()), f"{len(rows)} rows, {given.ranks} ranks"))
    for name in ("operators", "operators that DTensor runs", "operators in which a move of ours ran", "moves of ours"):
        print(f"{name}: {result[name]}")
    for row in result["against ours"]:
        print(f"{row['verdict']}: {row['name']} {row['about']}: {row['lines'][0]}")
    about = {
        "ranks": given.ranks, "meshes": MESHES[given.ranks], "count": given.count, "orders": given.orders,
        "seed": given.seed, "only": given.only, "patience": PATIENCE,
    }  # fmt: skip
    shown = [{k: v for k, v in r.items() if k not in ("told", "stock wrong", "moves", "seconds")}
             | {"moves": sum(Counter(r["moves"]).values())} for r in rows]  # fmt: skip
    write(out, record(about, {"seconds": seconds, "starts": starts} | result | {"rows": shown}))
    kept.unlink()


if __name__ == "__main__":
    main()
