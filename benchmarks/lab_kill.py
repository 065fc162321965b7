"""kill -9 of the lab at random points: what is left behind.

`shardplan lab run` is started, and after a random time one of its first three processes (the command, `unshare`, the
first process inside the namespaces) is killed with SIGKILL: while links are built, while ranks start, while the result
is verified, while messages move. Five seconds later no process below it may live, no network namespace beside those of
before may exist, and no link beside those of before.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import arguments, record, table, write

from shardplan.execution.lab import missing

COMMAND = ("lab", "run", "--reduce", "a", "--mesh", "a=8", "--rates", "20,100", "--repetitions", "20")
LONGEST = 9.0  # seconds to a kill: building and starting take about 3, the rest is traffic
PATIENCE = 5.0


def below(pid: int) -> list[int]:
    """List the living processes below one, parents first."""
    found: list[int] = []
    stack = [pid]
    while stack:
        here = stack.pop(0)
        for task in Path(f"/proc/{here}/task").glob("*/children"):
            try:
                children = [int(p) for p in task.read_text().split()]
            except OSError:
                continue
            found += children
            stack += children
    return found


def alive(pid: int) -> bool:
    """Say whether a process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def spaces() -> set[str]:
    """List the network namespaces that some process is in."""
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found


def links() -> str:
    """List the links of this namespace."""
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


def attempt(delay: float, victim: int) -> dict[str, object]:
    """Kill once, and look."""
    spaces_before, links_before = spaces(), links()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardplan", *COMMAND], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(delay)
        tree = [process.pid, *below(process.pid)]
        made = len(spaces() - spaces_before)
        chosen = min(victim, len(tree) - 1)
        os.kill(tree[chosen], signal.SIGKILL)
        killed = time.monotonic()
        if chosen:
            # The command sees that its host is gone and ends by itself.
            process.wait(60)
        else:
            process.wait(10)
        while time.monotonic() - killed < PATIENCE and (any(map(alive, tree[1:])) or spaces() - spaces_before):
            time.sleep(0.05)
        return {
            "seconds": round(delay, 2),
            "victim": ("the command", "unshare", "the first process inside")[chosen],
            "processes": len(tree),
            "namespaces": made,
            "processes left": sum(map(alive, tree)),
            "namespaces left": len(spaces() - spaces_before),
            "links left": links() != links_before,
            "status": process.returncode,
            "gone after": round(time.monotonic() - killed, 2),
        }
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def main() -> None:
    """Kill, look, tell."""
    parser = arguments("lab_kill", "What a killed lab leaves behind.", 20, of="kills")
    parser.add_argument("--seed", type=int, default=0, help="of the random times and victims (default %(default)s)")
    options = parser.parse_args()
    if lacking := missing():
        raise SystemExit(lacking)
    source = random.Random(options.seed)
    rows: list[dict[str, object]] = []
    for k in range(options.count):
        # One of ever later windows each, so that all of a run is covered.
        delay = LONGEST * (k + source.random()) / options.count
        rows.append(attempt(delay, source.randrange(3)))
        print(rows[-1], flush=True)
    left = sum(bool(r["processes left"] or r["namespaces left"] or r["links left"]) for r in rows)
    result = {"kills": len(rows), "kills that left something": left, "rows": rows}
    print(table(("kills", "left something"), [(len(rows), left)]))
    write(options.out, record({"count": options.count, "seed": options.seed, "command": " ".join(COMMAND)}, result))
    if left:
        raise SystemExit(f"{left} of {len(rows)} kills left something behind")


if __name__ == "__main__":
    main()
