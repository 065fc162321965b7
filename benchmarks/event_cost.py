"""What a message costs in the event simulation: processor time of a ring all-reduce, 2 (k - 1) k messages.

`python -m benchmarks.event_cost [--count 7]`: `simulate` takes the program, whose groups are tasks; `replayed` its
script, message by message, on one switch, where all devices go in step, and over nodes, where each has its own pace.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from benchmarks.common import arguments, record, spread, table, write

import shardplan as sp
from shardplan.core.ops import AllReduce
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.simulation.replay import replayed
from shardplan.simulation.scripts import script_of

TARGET = 1.0  # microseconds a message, of `simulate`
SIZES = (32, 64, 256)
PLACES = ("nominal", "dgx-a100", "dgx-h100", "gcp-a100x16")


def topology_of(name: str, devices: int) -> sp.Topology:
    """A preset with so many devices."""
    if name == "nominal":
        return sp.Topology.load(name, devices=devices)
    found = sp.Topology.load(name)
    return found.resize(node=devices // found.level_sizes[-1])


def micros(work: Callable[[], object], messages: int, count: int) -> list[float]:
    """Processor time of some runs, in microseconds a message."""
    found: list[float] = []
    for _ in range(count):
        started = time.process_time()
        work()
        found.append(1e6 * (time.process_time() - started) / messages)
    return found


def main() -> None:
    options = arguments("event_cost", "Microseconds a message of the event simulation.", 7, of="runs").parse_args()
    lines: list[list[object]] = []
    rows: list[dict[str, object]] = []
    for devices in SIZES:
        t = sp.TensorType.parse("f32[1048576]{+x}", sp.Mesh(x=devices))
        program = Program({"0": t}, [Step(AllReduce(("x",)), ("0",), ("1",))], ("1",))
        script = script_of(program)
        messages = int(np.size(script.table().nbytes))
        for name in PLACES:
            place = topology_of(name, devices)
            both = [
                micros(lambda: sp.simulate(program, place), messages, options.count),  # noqa: B023
                micros(lambda: replayed(script, place), messages, options.count),  # noqa: B023
            ]
            lines.append([name, devices, messages, *(spread(x)["median"] for x in both)])
            ends = {"simulate": spread(both[0]), "replayed": spread(both[1])}
            rows.append({"topology": name, "devices": devices, "messages": messages} | ends)
    head = ("topology", "devices", "messages", "simulate", "replayed")
    print(table(head, lines, f"microseconds a message, median of {options.count}"))
    write(options.out, record({"count": options.count}, {"target": TARGET, "microseconds a message": rows}))


if __name__ == "__main__":
    main()
