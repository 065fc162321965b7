"""The price of a kernel: the one that the closed form, events, ops and plans ask, of one kernel or of arrays of them.

It takes the longer of its operations and of what it reads and writes (the roofline model, Williams et al., 2009), at
the shares of the device's rates that kernels of its class reach (`KernelShares`). A product of m x k by k x n takes
1 + half (1/m + 1/n + 1/k) times what a large one takes for its operations. Attention is dealt out to processors in
blocks of queries, back in blocks of keys: the longest of them is the least that it takes, and how many there are is
what it takes beside (Dao, arXiv 2307.08691, section 3.2). Each block does whole what the diagonal cuts; the
exponentials of a score come on top of what its products take; values are padded to the width of keys.
"""

from __future__ import annotations

import math

import numpy as np

from shardplan.core.pattern import Work
from shardplan.hardware.level import DeviceSpec

# Of attention, fitted to one half of 62 kernels of FlashAttention 2 and cuDNN on A100, H200 and B200 (SimuMax of
# MooreThreads at 4dcaae5, configs/system; benchmarks/results/gpu.json), 13 % off the other half in the mean where one
# share a class and device is 19 % (`python -m benchmarks.kernel_shapes`).
HEAD = 128.0  # the width of a head at which shares are stated
EXPONENTIALS = 16 * 1.6e9  # a second of one processor: 16 a clock (CUDA programming guide, arithmetic instructions)
ENDS = 0.27  # of the longest block, for which processors wait for each other at the end
BACKWARD = 0.85  # how fast the backward pass is beside the forward one
KEYS = 128.0  # of a block of the backward pass


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
        stretch = _score_stretch(work, device) if work.sides else 1.0
    busy = work.flops / rate * stretch if math.isfinite(rate) else 0.0
    return np.maximum(busy, work.nbytes / (device.memory_bandwidth * shares.stream))


def _score_stretch(work: Work, device: DeviceSpec) -> np.ndarray | float:
    """How many times as long as its operations at the share of long sequences and heads of 128 attention takes."""
    heads, queries, keys, width, value, seen, products = work.sides
    back = bool(np.all(np.asarray(products) > 2))
    block, along = (KEYS, keys) if back else (device.kernels.queries, queries)
    wide = np.maximum(width, value)
    # What a score's exponential takes, in elements along a head, each of which is four operations of two products.
    rate = device.rate(work.dtype)
    along_head = rate / device.processors / EXPONENTIALS / 4 if device.processors and math.isfinite(rate) else 0.0
    padded = 2 * wide / (width + value) * (1 + along_head / wide) / (1 + along_head / HEAD)
    whole = 1 + 2 * (1 - seen) * np.minimum(1.0, block / queries)
    # A block that sees all keys, beside the mean of those that a processor gets; short ones share the keys out instead.
    longest = device.processors / (heads * np.ceil(along / block) * seen) * (queries >= block)
    stretch = padded * np.maximum(longest, whole + ENDS * longest)
    return stretch / BACKWARD if back else stretch


def stream_seconds(nbytes: np.ndarray | float, device: DeviceSpec) -> np.ndarray | float:
    """Return the seconds in which a kernel reads and writes so many bytes, and does nothing else to speak of."""
    return kernel_seconds(Work(0.0, "", nbytes), device)
