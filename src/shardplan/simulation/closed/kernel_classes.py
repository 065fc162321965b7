"""Classes of kernels: attention by its generation, and products that are narrower than what they read."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardplan.core.pattern import Work
from shardplan.core.step import Step
from shardplan.hardware.level import DeviceSpec, KernelShares
from shardplan.simulation.closed.parameters import Parameters
from shardplan.simulation.closed.read_block import ReadBlock

Floats = np.ndarray
# How much faster later kernels of attention are than the first: arXiv 2307.08691 (about twice, less backward). On
# devices whose tensor cores run beside what else a processor does, those with products of 8 bits, kernels made for that
# are again 1.75 times (FlashAttention 3, arXiv 2407.08608, section 4.1) and 1.9 times as fast (cuDNN of today beside
# FlashAttention 2: benchmarks/results/gpu.json), cuDNN of 2024 1.61 times (539 beside 335 TFLOPS, causal, heads of 128,
# 16k tokens, H100: arXiv 2407.08608, figure 5); and how many queries these have at once.
FASTER = {"flash1": 1.0, "flash2": 1.6, "flash3": 1.6, "cudnn": 1.6, "cudnn_2024": 1.6}
BESIDE = {"flash3": 1.75, "cudnn": 1.9, "cudnn_2024": 1.61}
QUERIES = {"cudnn": 256.0, "cudnn_2024": 256.0}
# Bytes of an element of narrow products, with the scales of each 32 or 16 of them (OCP MX 1.0; NVFP4).
NARROW_BYTES = {"f8": 1 + 1 / 32, "f4": 0.5 + 1 / 16}


@lru_cache(maxsize=64)
def with_kernels(device: DeviceSpec, p: Parameters, attention: str = "flash2") -> DeviceSpec:
    """Return a device at the shares of its rates that kernels reach by parameters, with this class of attention."""
    fused = p.attention * FASTER.get(attention, 1.0)
    if any(dtype.startswith("f8") for dtype, _ in device.flops):
        fused *= BESIDE.get(attention, 1.0)
    return replace(device, kernels=KernelShares(p.product, fused, p.stream, p.half, QUERIES.get(attention, 128.0)))


def narrow_bytes(dtype: str) -> float:
    """Return the bytes of an element of products in a dtype, with its scale; 0 where it is no narrow one.

    >>> narrow_bytes("f8"), narrow_bytes("bf16")
    (1.03125, 0.0)
    """
    return NARROW_BYTES.get(dtype[:2], 0.0)


def cast_work(wide: int, narrow: float, elements: Floats, dtype: str) -> Work:
    """Return the kernel that casts elements for narrow products: they are read, and written as rows and as columns."""
    return Work(0.0, dtype, elements * (wide + 2 * narrow))


def cast_operands(block: ReadBlock, step: Step) -> tuple[int, ...]:
    """Return which operands of a product with a parameter kernels of their own cast, where products are narrow.

    A value is cast once, for all products that read it, forward and back. Those are what products and attention make,
    and what comes from outside; what only streams writes narrow what it makes, twice (norms and activations of
    Transformer Engine; all of it under torch.compile). Parameters are cast once a step.
    """
    others = [o for o in step.operands if o not in block.held and o not in block.narrow and o not in block.saved]
    block.narrow |= {*step.operands}
    return tuple(k for k, o in enumerate(step.operands) if o in others and block.maker.get(o) != "streamed")
