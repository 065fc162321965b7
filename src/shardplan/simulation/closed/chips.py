"""`Chip`: what kernels alone say of the devices of one make, and what machines with that chip have in common.

A machine that nobody measured steps on has the mean of those with its chip, and as spread what the mean leaves open and
what one machine differs from another: a normal model of logarithms with two levels (Gelman and Hill, 2007, chapter 12).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardplan.hardware.topology import Topology
from shardplan.simulation.closed.parameters import Parameters

FREE = ("product", "stream", "launch", "eager", "network", "attention")
# Deviations of logarithms: of what tables of kernels and of collectives say of a chip, from what its steps do.
KNOWN: Mapping[str, float] = {
    "product": 0.1,
    "stream": 0.25,
    "launch": 0.5,
    "eager": 0.5,
    "network": 0.3,
    "attention": 0.2,
}
# Of one machine, in its years and with its software, from another with the same chip.
APART: Mapping[str, float] = {
    "product": 0.1,
    "stream": 0.2,
    "launch": 0.5,
    "eager": 0.3,
    "network": 0.25,
    "attention": 0.15,
}
UNKNOWN = 2.0  # times `KNOWN`, of a chip of which there are no tables
NEAR = 1.15  # times a peak, within which it is the same chip's


@dataclass(frozen=True, slots=True)
class Chip:
    """A make of device, known by its library and its peak of 16 bits in operations per second; `kernels` reach that."""

    name: str
    library: str
    peak: float
    kernels: Parameters


# Medians of large kernels: A100 and B200 of SimuMax's tables (products 0.71 to 0.80 of the peak on A100, 0.44 to 0.65
# on B200; long causal attention, `flash2` 0.6 on A100, `cudnn` 0.45 on B200, over what is faster than `flash1`), H100
# of benchmarks/results/gpu.json (products 0.65 to 0.79, `flash2` 0.33, `cudnn` 0.65, copies 0.85, norms 0.5, softmax
# 0.25 to 0.4 of the bandwidth).
CHIPS = (
    Chip("A100", "nccl", 312e12, Parameters(product=0.76, stream=0.7, launch=1e-5, eager=4e-5, attention=0.37)),
    Chip("H100", "nccl", 989.4e12, Parameters(product=0.68, stream=0.6, launch=1e-5, eager=4e-5, attention=0.21)),
    Chip("B200", "nccl", 2350e12, Parameters(product=0.58, stream=0.55, launch=1e-5, eager=4e-5, attention=0.15)),
)


def chip_of(topology: Topology) -> Chip | None:
    """Return the chip of a topology's devices; None where there are no tables of its kernels.

    >>> found = chip_of(Topology.load("gb300-nvl72"))
    >>> found and found.name
    'B200'
    """
    rates = dict(topology.device.flops)
    peak = max(rates.get("bf16", 0.0), rates.get("f16", 0.0))
    for chip in CHIPS:
        if topology.library == chip.library and chip.peak / NEAR <= peak <= chip.peak * NEAR:
            return chip
    return None


def common(chip: Chip | None, mates: Mapping[str, tuple[Parameters, np.ndarray]]) -> tuple[Parameters, np.ndarray]:
    """Return what a further machine of a chip is taken for: parameters, and variances of their logarithms, [FREE].

    Args:
        chip: The chip; of None it is what is usual, half as well known.
        mates: By name the parameters of machines with the chip, and the variances of their logarithms, [FREE].

    >>> _, alone = common(CHIPS[0], {})
    >>> _, beside = common(CHIPS[0], {"one": (CHIPS[0].kernels, np.zeros(6))})
    >>> bool((beside < alone).all())
    True
    """
    start = chip.kernels if chip else Parameters()
    known, apart = (np.array([table[name] for name in FREE]) ** 2 for table in (KNOWN, APART))
    weight = 1 / (known * (1.0 if chip else UNKNOWN**2))
    total = weight * _logarithms(start)
    for parameters, variances in mates.values():
        mine = 1 / (apart + variances)
        weight, total = weight + mine, total + mine * _logarithms(parameters)
    values = np.exp(total / weight)
    found = {name: float(v) for name, v in zip(FREE, values, strict=True)}
    spread = 1 / weight + apart
    for _, variances in mates.values():  # it is known no better than any of them
        spread = np.maximum(spread, np.where(np.isfinite(variances), variances, 0.0))
    return Parameters(**found), spread


def _logarithms(p: Parameters) -> np.ndarray:
    return np.log([getattr(p, name) for name in FREE])
