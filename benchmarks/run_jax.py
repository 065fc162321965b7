"""Random programs on JAX: eight forced CPU devices against the numpy reference, bit for bit; and their bytes.

`python -m benchmarks.run_jax [--count 2000] [--seed 0]`. The programs are those of the conformance suite of the tests
(`tests/conformance.py`, even types: JAX has no others): chains of random ops, redistributions (batches and other
meshes among them), computations, packed collectives; integer data in all dtypes, so that every sum is exact. Of each
program the collectives of the compiled HLO are counted too: the bytes that every device receives against
`moved_bytes`, which is what the program says but for the differences declared there (XLA has no reduce, broadcast or
all-to-all-v), and how often those differences occur. Sums of numbers narrower than 32 bits are left out of that
comparison where they differ: XLA:CPU may widen them. Each child process runs one part of the programs.
"""

from __future__ import annotations

import collections
import json
import time
import traceback
from typing import Any

from benchmarks.common import Progress, arguments, record, table, use_tests, write
from benchmarks.peers.hlo import received_bytes
from benchmarks.processes import with_devices

from shardplan.interop.hlo import parse_hlo

DEVICES = 8
PART = 200
LISTED = 20


def part(seed: int, count: int) -> dict[str, Any]:
    """Run `count` programs in this process, which has eight devices; what became of them."""
    conformance = use_tests("conformance")
    from shardplan.execution.jax.run import run_program

    kinds: collections.Counter[str] = collections.Counter()
    ops: collections.Counter[str] = collections.Counter()
    books: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    seconds = 0.0
    for case in conformance.cases(seed, count, DEVICES, even=True):
        kinds[case.name.split()[0]] += 1
        ops.update(step.op.name for step in case.program.steps)
        started = time.perf_counter()
        try:
            got = run_program(case.program, case.inputs(), timeout=60)
            found = conformance.differences(case, lambda m: range(m.size), got, case.expected())
            seconds += time.perf_counter() - started
            books[compared(case.program)] += 1
        except Exception:
            found = [f"{case.name}\n{case.program}\n{traceback.format_exc()[-1500:]}"]
        wrong += found[:1]
    return {"kinds": kinds, "ops": ops, "bytes": books, "wrong": wrong, "seconds": seconds}


def compared(program: Any) -> str:
    """How the bytes in the compiled program compare with what it says: one of the rows of the result."""
    from shardplan.execution.jax.lower import moved_bytes
    from shardplan.execution.jax.run import compile_program, compiled_text

    got: collections.Counter[int] = collections.Counter()
    parts = [p for p in compile_program(program) if p.executable is not None]
    for text, one in zip(compiled_text(program), parts, strict=True):
        for c in parse_hlo(text, len(one.devices)):
            for place, n in enumerate(received_bytes(c, len(one.devices))):
                got[one.devices[place]] += n
    says: collections.Counter[int] = collections.Counter()
    plain: collections.Counter[int] = collections.Counter()
    narrow = False
    for step in program.steps:
        operands, results = program.step_types(step)
        says.update(moved_bytes(step.op, *operands))
        plain.update(dict(zip(results[0].mesh.devices, map(int, step.op.received_bytes(*operands)), strict=True)))
        narrow |= hasattr(step.op, "reduction") and any(t.itemsize < 4 for t in operands)
    if all(got[d] == says[d] for d in program.devices):
        if all(says[d] == plain[d] for d in program.devices):
            return "as the program says"
        return "more, as declared"
    if narrow:
        return "a sum of narrow numbers, widened by XLA:CPU"
    if all(got[d] <= says[d] for d in program.devices):
        return "fewer: XLA simplified a collective away"
    return "other"


def child(seed: int, count: int) -> dict[str, Any]:
    """Run a part in a process of its own."""
    try:
        return with_devices(DEVICES, "run_jax", "--child", seed, "--count", count)
    except SystemExit as end:
        return {"kinds": {}, "ops": {}, "bytes": {}, "seconds": 0.0, "wrong": [f"seed {seed}: {end}"]}


def main() -> None:
    parser = arguments("run_jax", "Random programs on JAX against the reference.", 2000, of="programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=int, help="run in this process, with this seed, and print JSON")
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(part(options.child, options.count)))
        return
    totals = {name: collections.Counter[str]() for name in ("kinds", "ops", "bytes")}
    wrong: list[str] = []
    seconds = 0.0
    progress = Progress("programs", options.count)
    for k, first in enumerate(range(0, options.count, PART)):
        count = min(PART, options.count - first)
        found = child(1000 * options.seed + k, count)
        for name, counter in totals.items():
            counter.update(found[name])
        wrong += found["wrong"]
        seconds += found["seconds"]
        progress.add(count, f"{len(wrong)} wrong")
    rows = [[name, n] for counter in totals.values() for name, n in counter.most_common()]
    print(
        table(("of the programs", "count"), rows, f"{options.count} programs on {DEVICES} devices: {len(wrong)} wrong")
    )
    result = {
        "programs": options.count,
        "wrong": len(wrong),
        "failures": wrong[:LISTED],
        "kinds": dict(totals["kinds"].most_common()),
        "steps by op": dict(totals["ops"].most_common()),
        "bytes in the compiled program": dict(totals["bytes"].most_common()),
        "seconds to compile and run": seconds,
    }
    write(options.out, record({"count": options.count, "seed": options.seed, "devices": DEVICES, "part": PART}, result))


if __name__ == "__main__":
    main()
