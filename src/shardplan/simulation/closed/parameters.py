"""`Parameters`: what of a machine no data sheet says; few numbers that measurements of it determine."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Parameters:
    """Physical numbers of a machine and the libraries on it; the others are its data sheet's.

    Args:
        product: The part of the peak that large matrix products reach.
        stream: The part of the memory bandwidth that kernels reach which only read and write.
        launch: Seconds after which the host issues the next kernel; a device that is done sooner waits.
        eager: The same of software that computes attention in steps, as that of 2020 to 2022 did.
        network: The part of the bandwidth between nodes, as the topology delivers it, that a step's collectives reach.
        attention: The part of the peak that fused attention of the first generation (`flash1`) reaches with heads of
            128 in long sequences, counted causal where it is.
        half: The size at which a dim of a product takes as long again: a product of m x k by k x n takes
            1 + half (1/m + 1/n + 1/k) times what a large one takes for its operations. By hand: products say 86 to 150.
        order: How sharply a device that waits for the host, and a host that waits for the device, exclude each other:
            with infinity the longer of both counts, with 1 their sum.
        context: Bytes that the driver and libraries hold on a device, where those are counted.
        fragmentation: How many times the bytes of what comes and goes the allocator holds, where those are counted.
    """

    product: float = 0.75
    stream: float = 0.75
    launch: float = 8e-6
    eager: float = 8e-6
    network: float = 0.6
    attention: float = 0.25
    half: float = 60.0
    order: float = 3.0
    context: float = 0.0
    fragmentation: float = 1.0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return what they are called."""
        return tuple(f.name for f in fields(cls))
