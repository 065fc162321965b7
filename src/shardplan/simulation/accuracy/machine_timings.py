"""`params_of_timings`: a machine's parameters by kernels and collectives timed on it, beside its data sheet.

Products say `product` and `half` (linear in 1/m + 1/n + 1/k), copies `stream`, fused attention `attention`, a chain of
kernels that do nothing `launch`, and collectives beyond the innermost level `network`. What was not timed stays as the
machines with the same chip have it. A step is no kernel: each is as well known as tables of kernels say of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardplan.core.dtypes import numpy_dtype
from shardplan.core.pattern import Groups, Messages, Pattern
from shardplan.errors import ShardplanError
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.topology import Topology
from shardplan.simulation.accuracy.step_fitting import LIMITS
from shardplan.simulation.closed.chips import FREE, KNOWN
from shardplan.simulation.closed.collectives import KINDS, with_network
from shardplan.simulation.closed.kernel_classes import FASTER
from shardplan.simulation.closed.machines import MachineFit, fit_text, machine_of
from shardplan.simulation.closed.parameters import Parameters

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "message")
MEMORY_BOUND = 0.8  # of a product's seconds, from which on it is memory that takes them
ROUNDS = 60  # of a bisection


class KernelTiming(NamedTuple):
    """A kernel, or a chain of them.

    `product` is of m, k, n; `copy` of bytes; `attention`, causal, of batch, heads, tokens and their size; `launch` of
    so many that do nothing.
    """

    kind: str
    sizes: tuple[int, ...]
    seconds: float = 0.0


class CollectiveTiming(NamedTuple):
    """A collective of all devices, or `message`: each sends to the next; bytes are those of the larger buffer."""

    kind: str
    nbytes: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MachineTimings:
    """What was timed: products and attention in `dtype`; `lacking` are collectives that there are none of."""

    dtype: str
    kernels: tuple[KernelTiming, ...]
    collectives: tuple[CollectiveTiming, ...] = ()
    lacking: tuple[str, ...] = ()

    def of_kind(self, kind: str) -> list[KernelTiming]:
        """Return the kernels of a kind."""
        return [one for one in self.kernels if one.kind == kind]


@dataclass(frozen=True, slots=True, eq=False)
class TimedMachine:
    """Parameters by timings; `kept` are not by them, `beside` has measured over priced seconds by collective.

    `is_slow` says that the network delivers no more than the least part that is legal.
    """

    fit: MachineFit
    kept: tuple[str, ...]
    beside: Mapping[str, float]
    text: str  # the file

    @property
    def is_slow(self) -> bool:
        """Whether collectives take longer than the topology can be read to say."""
        return "network" not in self.kept and self.fit.parameters.network <= LIMITS["network"][0] * (1 + 1e-9)


def params_of_timings(timings: MachineTimings, topology: Topology, source: str) -> TimedMachine:
    """Return a machine's parameters, and the file of them.

    Raises `ShardplanError` where more was measured than the topology's device states, or it states nothing.
    """
    name, base = topology.name, machine_of(topology)
    found: dict[str, float] = {"stream": stream_share(timings, topology)}
    found["product"], found["half"] = product_shares(timings, topology, found["stream"])
    found |= {"attention": share} if (share := attention_share(timings, topology)) else {}
    if launches := timings.of_kind("launch"):
        found["launch"] = min(one.seconds / one.sizes[0] for one in launches)
    beside = collectives_beside(timings, topology)
    if share := network_share(timings, topology):
        found["network"] = share
    parameters = replace(base.parameters, **found)
    variance = dict(zip(base.names, np.diag(base.covariance).tolist(), strict=True))
    variance |= {k: KNOWN[k] ** 2 for k in found if k in KNOWN}
    names = tuple(k for k in FREE if k in variance)
    fit = MachineFit(parameters, names, np.diag([variance[k] for k in names]))
    kept = tuple(k for k in (*FREE, "half") if k not in found)
    notes = {"kernels": len(timings.kernels), "collectives": len(timings.collectives)}
    return TimedMachine(fit, kept, beside, fit_text(name, source, fit, notes))


def product_shares(timings: MachineTimings, topology: Topology, stream: float) -> tuple[float, float]:
    """Return `product` and `half`: of seconds over those at the peak, least squares of relative errors."""
    peak, itemsize = topology.device.peak(timings.dtype), numpy_dtype(timings.dtype).itemsize
    rows: list[tuple[float, float]] = []
    for one in timings.of_kind("product"):
        m, k, n = one.sizes
        moved = (m * k + k * n + m * n) * itemsize / (topology.device.memory_bandwidth * stream)
        if moved < MEMORY_BOUND * one.seconds:
            rows.append((1 / m + 1 / n + 1 / k, one.seconds * peak / (2.0 * m * k * n)))
    if len(rows) < 3:
        raise ShardplanError(
            f"measure: of {len(timings.of_kind('product'))} products {len(rows)} took longer than their memory; legal "
            f"are 3 and more: is the memory_bandwidth of {topology.name} what its devices have?"
        )
    sides, times = np.array(rows).T
    columns = np.stack([np.ones(len(rows)), sides], axis=1) / times[:, None]
    slope, along = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)[0].tolist()
    least = float(times.min())
    _refuse_more(1 / least, f"products reach {peak / least / 1e12:.3g} TFLOP/s", f"flops of {timings.dtype}", topology)
    if along < 0:  # thin ones are no slower: then it is one number
        slope, along = float((1 / times).sum() / (1 / times**2).sum()), 0.0
    elif slope < 1:  # none reached the peak, so none would that is larger
        slope, along = 1.0, float((sides * (times - 1) / times**2).sum() / (sides**2 / times**2).sum())
    return 1 / slope, along / slope


def stream_share(timings: MachineTimings, topology: Topology) -> float:
    """Return the part of the memory bandwidth that the larger copies reach; each byte is read and written."""
    copies = sorted(timings.of_kind("copy"), key=lambda one: one.sizes)
    if not copies or not np.isfinite(topology.device.memory_bandwidth):
        raise ShardplanError(f"measure: {topology.name} states no memory_bandwidth; legal is one in its device")
    large = copies[len(copies) // 2 :]
    rates = [2 * one.sizes[0] / one.seconds for one in large]
    share = float(np.exp(np.mean(np.log(rates)))) / topology.device.memory_bandwidth
    _refuse_more(share, f"copies reach {np.median(rates) / 1e9:.3g} GB/s", "memory_bandwidth", topology)
    return share


def attention_share(timings: MachineTimings, topology: Topology) -> float | None:
    """Return `attention` by the largest that was timed, which is of today's kernels, counted causal."""
    timed = timings.of_kind("attention")
    if not timed:
        return None
    batch, heads, tokens, width = max(timed, key=lambda one: one.sizes).sizes
    seconds = max(timed, key=lambda one: one.sizes).seconds
    share = 2.0 * batch * heads * tokens**2 * width / seconds / topology.device.peak(timings.dtype)
    _refuse_more(share, "attention reaches more", f"flops of {timings.dtype}", topology)
    return share / FASTER["flash2"]


def network_share(timings: MachineTimings, topology: Topology) -> float | None:
    """Return `network`: the median over the largest collectives of the part at which their price is what was timed.

    None where no level but the innermost has several children, or nothing was timed.
    """
    if not timings.collectives or all(level.size == 1 for level in topology.levels[:-1]):
        return None
    low, high = LIMITS["network"]
    found = [_share_of(one, topology, low, high) for one in largest(timings.collectives)]
    return float(np.median(found))


def collectives_beside(timings: MachineTimings, topology: Topology) -> dict[str, float]:
    """Return by kind the seconds of the largest over its price at all that the topology delivers."""
    return {one.kind: one.seconds / _priced(one, topology, 1.0) for one in largest(timings.collectives)}


def largest(timed: Sequence[CollectiveTiming]) -> list[CollectiveTiming]:
    """Return of each kind the one of most bytes."""
    return [max((x for x in timed if x.kind == kind), key=lambda one: one.nbytes)
            for kind in dict.fromkeys(one.kind for one in timed)]  # fmt: skip


def pattern_of_timing(one: CollectiveTiming, devices: int) -> Pattern:
    """Return what it communicates between devices 0 to `devices` - 1."""
    members = np.arange(devices, dtype=np.int64)
    if one.kind == "message":
        return Messages(members, np.roll(members, -1), np.full(devices, float(one.nbytes)))
    held = one.nbytes / (devices if one.kind == KINDS[False, True] else 1)  # its part, before what is gathered
    return Groups(one.kind, members[None], np.array([held]))


def _priced(one: CollectiveTiming, topology: Topology, network: float) -> float:
    fabric = Fabric(with_network(topology, Parameters(network=network)))
    return price(pattern_of_timing(one, topology.size), fabric).seconds


def _share_of(one: CollectiveTiming, topology: Topology, low: float, high: float) -> float:
    """The share at which a collective is priced as it was timed; a price falls as the share grows."""
    if _priced(one, topology, high) >= one.seconds:
        return high
    for _ in range(ROUNDS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _priced(one, topology, middle) > one.seconds else (low, middle)
    return (low * high) ** 0.5


def _refuse_more(share: float, what: str, key: str, topology: Topology) -> None:
    if share > 1:
        raise ShardplanError(
            f"measure: {what}, {share:.3g} times what {topology.name} states; legal is a {key} of its device that is "
            "no less than what was measured"
        )
