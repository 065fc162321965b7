"""Where messages stand in a rank's list, measured on processes that do everything in order, one thing at a time.

`python -m benchmarks.schedule_placement [--count 5]`: a process a rank does its list as it stands. A computation
sleeps; a send is posted and done; a receive blocks until its message has come. The lists are torch's own, with its
default placement and with its cure (`defer_pp_recv=True`), and ours, in the cases of PyTorch issues 172668 and 188833
and two more, B twice as long as F. The runs of a case are interleaved; the ideal is the replay of its computations with
messages of the same time that block nobody. Torch's own runtime over gloo shows no such bubble, since gloo's receives
block no computation.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import arguments, record, table, write

from shardplan.strategy.schedules import Action, Schedule, Times, place_messages, replay
from strategy.schedules.torch_tables import written

CASES = {  # chunks, ranks, microbatches
    "172668: interleaved 1F1B, 2 ranks": ("Interleaved1F1B", 2, 2, 4),
    "188833: interleaved 1F1B, 8 ranks": ("Interleaved1F1B", 2, 8, 8),
    "breadth first, 4 ranks": ("LoopedBFS", 2, 4, 8),
    "ZB-V, 4 ranks": ("ZBVZeroBubble", 2, 4, 8),
}
COST, MESSAGE = Times(1, 1, 1), 0.1  # a B is an I and a W
UNIT = 0.04  # seconds
Ends = Mapping[tuple[int, int], tuple[socket.socket, socket.socket]]


def run(found: Schedule, unit: float = UNIT) -> float:
    """The time of one step on a process a rank, in units."""
    owners = dict(enumerate(found.owners))
    pairs = {(a, b): socket.socketpair() for a in range(len(found.ranks)) for b in range(len(found.ranks)) if a != b}
    read, wrote = os.pipe()
    begin = time.monotonic() + 0.3 + 0.05 * len(found.ranks)
    children: list[int] = []
    for rank, row in enumerate(found.ranks):
        child = os.fork()
        if not child:
            try:
                end = _rank(rank, [a for a in row if a is not None], owners, pairs, begin, unit)
                os.write(wrote, struct.pack("d", end))
            finally:
                os._exit(0)
        children.append(child)
    os.close(wrote)
    for child in children:
        os.waitpid(child, 0)
    answers = os.read(read, 4096)
    os.close(read)
    for one in (s for pair in pairs.values() for s in pair):
        one.close()
    ends = struct.unpack(f"{len(answers) // 8}d", answers)
    if len(ends) < len(children):
        raise SystemExit("a rank did not come to its end")
    return (max(ends) - begin) / unit


def _rank(rank: int, row: Sequence[Action], owners: Mapping[int, int], pairs: Ends, begin: float, unit: float) -> float:
    """Do a list in order; return when it is done."""
    came: dict[Action, float] = {}  # messages that were read on the way to others, and when they are here
    _until(begin)
    for action in row:
        if action.kind.startswith("SEND"):
            to = owners[action.stage + (1 if action.kind == "SEND_F" else -1)]
            text = f"{time.monotonic() + MESSAGE * unit!r} {action}\n".encode()
            pairs[rank, to][0].sendall(text.rjust(64))
        elif action.kind.startswith("RECV"):
            source = owners[action.stage + (-1 if action.kind == "RECV_F" else 1)]
            while action.matching not in came:
                at, said = pairs[source, rank][1].recv(64, socket.MSG_WAITALL).split()
                came[Action.parse(said.decode())] = float(at)
            _until(came[action.matching])
        else:
            _until(time.monotonic() + unit * sum(COST(leaf) for leaf in action.leaves))
    return time.monotonic()


def _until(then: float) -> None:
    while (left := then - time.monotonic()) > 0:
        time.sleep(left)


def lists(name: str, chunks: int, ranks: int, microbatches: int) -> dict[str, Schedule]:
    """The schedule with messages as torch places them, as its cure does, and as we do."""
    with tempfile.TemporaryDirectory() as folder:
        default, cure = (
            Schedule.from_csv(written(name, ranks, microbatches, chunks, Path(folder), defer=defer)[1])
            for defer in (False, True)
        )
    return {"torch": default, "torch, defer_pp_recv": cure, "placed": place_messages(default, COST, MESSAGE)}


def main() -> None:
    options = arguments("schedule_placement", "Placed messages on in-order processes.", 5, of="steps").parse_args()
    found: dict[str, Any] = {}
    lines: list[list[Any]] = []
    for case, said in CASES.items():
        variants = lists(*said)
        ideal = replay(variants["torch"].compute_only(), COST, MESSAGE).makespan
        events = {k: replay(v, COST, MESSAGE, "buffered").makespan for k, v in variants.items()}
        samples: dict[str, list[float]] = {k: [] for k in variants}
        for _ in range(options.count):
            for k, v in variants.items():
                samples[k].append(run(v))
        middle = {k: median(v) for k, v in samples.items()}
        recovered = (middle["torch"] - middle["placed"]) / (middle["torch"] - ideal)
        found[case] = {
            "ideal": ideal, "events": events, "measured": middle, "samples": samples, "recovered": recovered,
        }  # fmt: skip
        lines.append([case, ideal, *(x for k in variants for x in (events[k], middle[k])), 100 * recovered])
        print(".", end="", file=sys.stderr, flush=True)
    heads = [f"{k}, {how}" for k in ("torch", "cure", "placed") for how in ("events", "measured")]
    print(table(["units of F", "ideal", *heads, "bubble recovered %"], lines))
    write(options.out, record({"count": options.count, "unit, seconds": UNIT, "message, units": MESSAGE}, found))


if __name__ == "__main__":
    main()
