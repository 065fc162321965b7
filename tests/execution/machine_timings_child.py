"""A rank that times a machine by a timer of known parameters: real calls, stub seconds. Rank 0 prints the file."""

import json
import sys
from pathlib import Path

from shardplan.execution.torch.machine_timings import Timed, join_machine, time_machine, wall_timer
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.simulation.accuracy.machine_timings import CollectiveTiming, params_of_timings, pattern_of_timing
from shardplan.simulation.closed.collectives import with_network
from shardplan.simulation.closed.parameters import Parameters

where = Topology.load(sys.argv[1])
KNOWN = json.loads(sys.argv[2])
FABRIC = Fabric(with_network(where, Parameters(network=KNOWN["network"])))
ran: list[str] = []


def stub(item: Timed, call: object) -> float:
    call()  # the real one, once
    ran.append(item.kind)
    if isinstance(item, CollectiveTiming):
        return price(pattern_of_timing(item, where.size), FABRIC).seconds
    peak, bandwidth = where.device.peak("f32"), where.device.memory_bandwidth
    match item.kind, item.sizes:
        case "product", (m, k, n):
            return 2 * m * k * n / (peak * KNOWN["product"]) * (1 + KNOWN["half"] * (1 / m + 1 / k + 1 / n))
        case "copy", (nbytes,):
            return 2 * nbytes / (bandwidth * KNOWN["stream"])
        case "attention", (b, h, s, d):
            return 2 * b * h * s * s * d / (peak * KNOWN["attention"] * 1.6)
        case _, (count,):
            return count * KNOWN["launch"]


with join_machine() as device:
    timings = time_machine(device, "f32", stub, lambda done, total: None)
    from torch.distributed import get_rank

    # A clock that goes on by one each time that it is looked at, on rank 1 by two: so long does a call take there.
    ticks, pace = iter(range(1000)), 2.0 if get_rank() == 1 else 1.0
    timed = wall_timer(device, 3.0, lambda: pace * next(ticks))(timings.kernels[0], lambda: None)
    if get_rank() == 0:
        found = params_of_timings(timings, where, "stubs")
        Path(sys.argv[3]).write_text(found.text)
        counts = {kind: ran.count(kind) for kind in dict.fromkeys(ran)}
        print(json.dumps({"ran": counts, "beside": dict(found.beside), "kept": found.kept, "timed": timed,
                          "ticks": next(ticks), "lacking": timings.lacking}))  # fmt: skip
