"""Random problems over all suites: every plan is run and compared, bounded and re-checked.

`python -m benchmarks.random_problems [--count 100000] [--seed 0] [--workers 2]`. Meshes of at most 24 devices are run
device by device with the oracle of the tests (`tests/oracle.py`: elements are their global index, addends and what
nobody may read are random numbers), and the shards of all devices are compared with the destination. On larger meshes
(16x16, 32x8x4, 64x32x32) arrays are not run: there the certificate is re-derived from the program, and its last type
compared with the destination box by box. Every fourth problem is planned with `portable=True` as well. A request with
a memory limit may be `Infeasible`; then a plan within `least_bytes` must exist, of at most 64 chunks a step, and one
within `absolute_least_bytes`, but none within a byte less.
"""

from __future__ import annotations

import collections
import contextlib
import math
import multiprocessing
import resource
import signal
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from benchmarks.common import Progress, arguments, listed, record, table, told, use_tests, write
from benchmarks.odd_problems import planned

import shardplan as sp
from benchmarks import odd_problems, suites
from shardplan.core.accounting import MANY_CHUNKS
from shardplan.core.messages import has_box_table
from shardplan.core.program import Program
from shardplan.core.tensor import same

SMALL, LARGE = 24, 65_536
CHUNK = 250
PORTABLE_EVERY = 4
DEADLINE = 60.0  # seconds for one problem, after which it counts as failed
LISTED = 200  # failures that a result file lists
# Problems of each suite per 1,000 of the count: on meshes that are run, and on large meshes.
SHARES = {
    "s8": 90, "s16": 70, "U": 190, "P": 130, "S": 100, "N": 130, "V": 90, "M": 80, "B": 20, "L": 40,
    "edge": 8, "marks": 12, "table": 10, "order": 16, "limit": 5, "where": 4,
}  # fmt: skip
LARGE_SHARES = {"U": 3, "P": 2, "S": 2, "N": 1, "V": 1, "M": 1}
FAULTS = ("wrong", "over bound", "certificate", "exception", "timeout")
MAKER = {"most_multiple": 2, "most_tensors": 6}


@dataclass(frozen=True, slots=True)
class Chunk:
    """The problems `problems(suite, seed, ...)`, of which a chunk takes `count` (those of large meshes if `large`)."""

    suite: str
    seed: int
    count: int
    large: bool = False

    @property
    def name(self) -> str:
        """The row of the result it counts for."""
        return f"{self.suite} large" if self.large else self.suite

    def cases(self) -> Iterator[tuple[int, suites.Case]]:
        """Yield its problems, with their numbers in the generator's sequence; large chunks leave out small meshes."""
        found = 0
        for k, case in enumerate(self._drawn()):
            if self.large and _mesh(case).size <= SMALL:
                continue
            yield k, case
            found += 1
            if found == self.count:
                return

    def _drawn(self) -> Iterator[suites.Case]:
        """Yield what the generator makes for the chunk, for large ones enough to choose from."""
        if self.suite in suites.LISTS:
            yield from (_small(case) for case in suites.problems(self.suite, 0, self.count))
            return
        if self.suite in odd_problems.SUITES:
            yield from odd_problems.problems(self.suite, self.seed, self.count, SMALL, MAKER["most_tensors"])
            return
        most, count = (LARGE, 100 * self.count) if self.large else (SMALL, self.count)
        yield from suites.problems(
            self.suite,
            self.seed,
            count,
            most_devices=most,
            most_multiple=MAKER["most_multiple"],
            most_tensors=MAKER["most_tensors"],
        )


@dataclass(slots=True)
class Tally:
    """What became of the problems of a suite."""

    problems: int = 0
    plans: int = 0
    run: int = 0
    over_limit: int = 0  # refused for the limit, rightly
    not_portable: int = 0  # refused with `portable`
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    seconds: float = 0.0  # of the processor
    statuses: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    peak_memory: int = 0  # KiB of the process

    def add(self, other: Tally) -> None:
        """Count another tally in."""
        self.problems += other.problems
        self.plans += other.plans
        self.run += other.run
        self.over_limit += other.over_limit
        self.not_portable += other.not_portable
        self.seconds += other.seconds
        self.faults = {k: n + other.faults[k] for k, n in self.faults.items()}
        self.statuses = dict(collections.Counter(self.statuses) + collections.Counter(other.statuses))
        self.failures = (self.failures + other.failures)[:LISTED]
        self.peak_memory = max(self.peak_memory, other.peak_memory)


class Fault(Exception):
    """A plan that breaks a promise: which, and how."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def _mesh(case: suites.Case) -> sp.Mesh:
    return listed(case[0])[0].mesh


def _small(case: suites.Case) -> suites.Case:
    """A problem of the lists on the smallest array that its layouts tile; of a batch a few of its tensors."""
    s, t, keywords = case
    if isinstance(s, list) and isinstance(t, list):
        kinds = list(dict.fromkeys(suites.shrunk(a, b) for a, b in zip(s, t, strict=True)))
        return [a for a, _ in kinds], [b for _, b in kinds], keywords
    if isinstance(s, sp.TensorType) and isinstance(t, sp.TensorType) and s.all_even and t.all_even:
        return *suites.shrunk(s, t), keywords
    return case


def work(chunk: Chunk) -> tuple[str, Tally]:
    """Solve and judge the problems of a chunk."""
    tally = Tally()
    started = time.process_time()
    for k, case in chunk.cases():
        judge(case, chunk, k, tally)
    tally.seconds = time.process_time() - started
    tally.peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return chunk.name, tally


def judge(case: suites.Case, chunk: Chunk, k: int, tally: Tally) -> None:
    """Count one problem, and list it with its reproducer where a promise is broken."""
    tally.problems += 1
    modes = (False, True) if k % PORTABLE_EVERY == 0 else (False,)
    for portable in modes:
        keywords = case[2] | ({"portable": True} if portable else {})
        try:
            with deadline(DEADLINE):
                one(case[0], case[1], keywords, not chunk.large, tally)
        except Fault as fault:
            kind, reason = fault.kind, str(fault)
        except TimeoutError:
            kind, reason = "timeout", f"no answer in {DEADLINE:g} s"
        except Exception as failure:  # whatever the planner raises is a finding
            where = traceback.extract_tb(failure.__traceback__)[-1]
            kind, reason = "exception", f"{type(failure).__name__}: {failure} ({where.name}, line {where.lineno})"
        else:
            continue
        tally.faults[kind] += 1
        if len(tally.failures) < LISTED:
            place = asdict(chunk) | {"index": k}
            text = told(case[0], case[1], **keywords)
            tally.failures.append({"kind": kind, "reason": reason[:400], "problem": text[:600], "place": place})


def one(s: suites.Ends, t: suites.Ends, keywords: dict[str, Any], runs: bool, tally: Tally) -> None:
    """Plan one request and hold the plan to its promises."""
    try:
        plan = planned(s, t, **keywords)
    except sp.Infeasible as refusal:
        if not keywords:
            raise
        if "memory_limit" not in keywords:
            tally.not_portable += 1
            return
        if refusal.least_bytes is None and never_portable(s, t, keywords):
            tally.not_portable += 1
            return
        plan = least_plan(s, t, keywords, refusal)
        tally.over_limit += 1
    tally.plans += 1
    status = plan.certificate.status
    tally.statuses[status] = tally.statuses.get(status, 0) + 1
    targets = [*listed(t), *(plan.program.types[name] for name in plan.certificate.kept_inputs)]
    hold(plan, targets)
    if runs:
        boxed = any(x.layout.boxes for x in (*listed(s), *targets))
        reason = misplaced(plan, targets) if boxed else unsound(plan.program, targets)
        tally.run += 1
        if reason is not None:
            raise Fault("wrong", reason)


def never_portable(s: suites.Ends, t: suites.Ends, keywords: dict[str, Any]) -> bool:
    """Say whether a portable request is refused without a memory limit too."""
    if not keywords.get("portable"):
        return False
    try:
        planned(s, t, **{k: v for k, v in keywords.items() if k != "memory_limit"})
    except sp.Infeasible:
        return True
    return False


def least_plan(s: suites.Ends, t: suites.Ends, keywords: dict[str, Any], refusal: sp.Infeasible) -> sp.Plan:
    """The plan that a refusal says is possible; raises `Fault` when it is not, or when less would do."""
    least, absolute = refusal.least_bytes, refusal.absolute_least_bytes
    if least is None or absolute is None or not keywords["memory_limit"] < absolute <= least:
        raise Fault(
            "exception", f"refuses a limit of {keywords['memory_limit']}, states {absolute} and {least} as least"
        )
    plan = planned(s, t, **keywords | {"memory_limit": least})
    if any(step.op.chunks > MANY_CHUNKS for step in plan.program.steps):
        raise Fault("exception", f"states that {least} bytes need no more than {MANY_CHUNKS} chunks a step")
    planned(s, t, **keywords | {"memory_limit": absolute})
    with contextlib.suppress(sp.Infeasible):
        planned(s, t, **keywords | {"memory_limit": absolute - 1})
        raise Fault("exception", f"states {absolute} bytes as the least limit at all, but solves {absolute - 1}")
    return plan


def unsound(program: Program, targets: Sequence[sp.TensorType]) -> str | None:
    """Why a program does not deliver what the targets say, or None."""
    reason: str | None = use_tests("oracle").unsound(program, targets)
    return reason


def misplaced(plan: sp.Plan, targets: Sequence[sp.TensorType]) -> str | None:
    """The same where an end of the only tensor lies in a table of boxes, of which the oracle knows nothing."""
    (source,), (target,) = plan.program.input_types, targets
    array = np.arange(math.prod(source.shape), dtype=np.int32).reshape(source.shape)
    shards = sp.run(plan.program, sp.distribute(array, source))
    found = dict(zip(plan.program.output_types[0].mesh.devices, shards, strict=True))
    asked = dict(zip(target.mesh.devices, sp.distribute(array, target), strict=True))
    wrong = [device for device in asked if not np.array_equal(found[device], asked[device])]
    return f"device {wrong[0]} of {target} holds other values" if wrong else None


def hold(plan: sp.Plan, targets: Sequence[sp.TensorType]) -> None:
    """Raise `Fault` unless the plan ends in the destination, within its bound, with a certificate that follows."""
    certificate = plan.certificate
    if certificate.memory_limit is None and certificate.peak_bytes > certificate.bound_bytes:
        raise Fault("over bound", f"peak {certificate.peak_bytes} bytes, bound {certificate.bound_bytes}")
    if certificate.memory_limit is not None and certificate.workspace_bytes > certificate.memory_limit:
        raise Fault("over bound", f"workspace {certificate.workspace_bytes}, limit {certificate.memory_limit}")
    try:
        certificate.check()
    except sp.CertificateError as error:
        raise Fault("certificate", str(error)) from None
    for found, asked in zip(plan.program.output_types, targets, strict=True):
        if has_box_table(found, asked):
            if not same(found, asked):
                raise Fault("wrong", f"ends in {found}, asked was {asked}")
            continue
        order = [found.mesh.devices.index(d) for d in asked.mesh.devices] if found.mesh != asked.mesh else None
        boxes = found.boxes() if order is None else found.boxes()[order]
        if not np.array_equal(boxes, asked.boxes()):
            empty = (boxes[..., 0] >= boxes[..., 1]).any(-1) & (asked.boxes()[..., 0] >= asked.boxes()[..., 1]).any(-1)
            if not np.array_equal(boxes[~empty], asked.boxes()[~empty]):
                raise Fault("wrong", f"ends in {found}, asked was {asked}")


@contextlib.contextmanager
def deadline(seconds: float) -> Generator[None]:
    """Raise `TimeoutError` in the block after so many seconds."""

    def ring(_number: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def chunks(count: int, seed: int) -> list[Chunk]:
    """Deal the count to suites and chunks, each with a seed of its own; the lists come once, whole."""
    lists = [Chunk(suite, 0, sum(1 for _ in suites.problems(suite, 0, count))) for suite in suites.LISTS]
    left = count - sum(c.count for c in lists)
    total = sum(SHARES.values()) + sum(LARGE_SHARES.values())
    wanted = [(s, n, False) for s, n in SHARES.items()] + [(s, n, True) for s, n in LARGE_SHARES.items()]
    exact = {(s, large): max(0, left) * n // total for s, n, large in wanted}
    exact["U", False] += max(0, left) - sum(exact.values())
    out = lists
    for (suite, large), amount in exact.items():
        size = CHUNK // 10 if large else CHUNK
        for k in range(0, amount, size):
            out.append(Chunk(suite, 1_000_000 * seed + k // size, min(size, amount - k), large))
    return out


def solve(tasks: Sequence[Chunk], workers: int) -> dict[str, Tally]:
    """Judge all chunks in worker processes; the longest kind of work first."""
    totals: dict[str, Tally] = {}
    progress = Progress("problems", sum(c.count for c in tasks))
    ordered = sorted(tasks, key=lambda c: (not c.large, c.suite not in suites.LISTS))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for name, tally in pool.imap_unordered(work, ordered):
            totals.setdefault(name, Tally()).add(tally)
            faults = sum(sum(t.faults.values()) for t in totals.values())
            progress.add(tally.problems, f"({faults} faults)")
    return {name: totals[name] for name in sorted(totals)}


def show(totals: dict[str, Tally]) -> None:
    """Print the table and the failures."""
    everything = Tally()
    for tally in totals.values():
        everything.add(tally)
    heads = ("suite", "problems", "plans", "run", "over limit", "not portable", *FAULTS, "ms each")
    rows = [
        [
            name,
            t.problems,
            t.plans,
            t.run,
            t.over_limit,
            t.not_portable,
            *t.faults.values(),
            1e3 * t.seconds / max(1, t.problems),
        ]
        for name, t in [*totals.items(), ("all", everything)]
    ]
    print(table(heads, rows, "random problems"))
    for failure in everything.failures[:20]:
        print(f"  {failure['kind']}: {failure['problem']}\n    {failure['reason']}\n    {failure['place']}")


def main() -> None:
    parser = arguments("random_problems", "Random problems over all suites, run and compared.", 100_000, of="problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started = time.perf_counter()
    totals = solve(chunks(options.count, options.seed), options.workers)
    show(totals)
    faults = {k: sum(t.faults[k] for t in totals.values()) for k in FAULTS}
    result = {
        "problems": sum(t.problems for t in totals.values()),
        "plans": sum(t.plans for t in totals.values()),
        "run on the reference": sum(t.run for t in totals.values()),
        "not run": "meshes of more than 24 devices (rows named 'large'): types, boxes and certificate are checked only",
        "faults": faults,
        "seconds": time.perf_counter() - started,
        "suites": {
            name: {k: v for k, v in asdict(tally).items() if k not in ("failures", "peak_memory")}
            for name, tally in totals.items()
        },
        "peak memory of a worker, MB": max(t.peak_memory for t in totals.values()) / 1024,
        "failures": [f for t in totals.values() for f in t.failures][:LISTED],
    }
    parameters = {"count": options.count, "seed": options.seed, "workers": options.workers, "per 1000": SHARES,
                  "per 1000, large": LARGE_SHARES, "generator": MAKER, "portable as well": f"every {PORTABLE_EVERY}th",
                  "seconds allowed for one": DEADLINE}  # fmt: skip
    write(options.out, record(parameters, result))


if __name__ == "__main__":
    main()
