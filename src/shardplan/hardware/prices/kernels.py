"""The price of a kernel: the one that the closed form, events, ops and plans ask, of one kernel or of arrays of them.

It takes the longer of its operations and of what it reads and writes (the roofline model, Williams et al., 2009), at
the shares of the device's rates that kernels of its class reach (`KernelShares`). A product of m x k by k x n takes
1 + half (1/m + 1/n + 1/k) times what a large one takes for its operations.
"""

from __future__ import annotations

import math

import numpy as np

from shardplan.core.pattern import Work
from shardplan.hardware.level import DeviceSpec


def kernel_seconds(work: Work, device: DeviceSpec) -> np.ndarray | float:
    """Return the seconds of a kernel on a device, [n] where its fields are arrays.

    What the device does not state takes no time.

    >>> from shardplan.hardware.level import KernelShares
    >>> device = DeviceSpec((("bf16", 100e12),), memory_bandwidth=1e12, kernels=KernelShares(product=0.5, half=64))
    >>> large, thin = (Work(5e9, "bf16", 1e6, "product", (n, 1e9, 1e9)) for n in (1e9, 64.0))
    >>> [round(float(kernel_seconds(work, device)) * 1e6, 3) for work in (large, thin)]
    [100.0, 200.0]
    """
    shares, rate = device.kernels, device.rate(work.dtype)
    stretch: np.ndarray | float = 1.0
    if work.kind == "product":
        rate *= shares.product
        stretch = 1 + shares.half * sum(1 / side for side in work.sides)
    elif work.kind == "scores":
        rate *= shares.attention
    busy = work.flops / rate * stretch if math.isfinite(rate) else 0.0
    return np.maximum(busy, work.nbytes / (device.memory_bandwidth * shares.stream))


def stream_seconds(nbytes: np.ndarray | float, device: DeviceSpec) -> np.ndarray | float:
    """Return the seconds in which a kernel reads and writes so many bytes, and does nothing else to speak of."""
    return kernel_seconds(Work(0.0, "", nbytes), device)
