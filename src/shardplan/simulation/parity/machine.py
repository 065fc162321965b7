"""The machine of DistIR's simulator and what it says that an op costs there, its mistakes kept.

Source: microsoft/dist-ir at commit 7cfa1b0, `executor/cost_model.py` and `utils/constants.py`; facts, not code. The
mistakes are numbered as in `docs/paper-2111.05426.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardplan.core import validation
from shardplan.errors import TopologyError

LAUNCH = 10e-6  # seconds an op that has a cost
BYTES_PER_GIGABIT = 1.25e8


@dataclass(frozen=True, slots=True)
class DistirMachine:
    """Alike devices, each pair of which has a link of its own; the defaults are DistIR's.

    Args:
        flops_per_second: Of a device; also elements a second of an elementwise op.
        bytes_per_second: Of a device's memory.
        launch: Seconds to start an op on a device. Nothing reads it (mistake 1): every op is launched in 10 us.
        gigabits_per_second: Of the link between two devices.
        allreduce: The fit (a, b, c) of an all-reduce by devices: `a * gigabits + b * devices + c` seconds; None for the
            formula of a ring.

    Raises `TopologyError` for a value that is not positive, `launch` for a negative one.

    Source: microsoft/dist-ir 7cfa1b0.

    >>> DistirMachine().elementwise((1024, 1024), 4, 1)
    1.4735236063492064e-05
    """

    flops_per_second: float = 1.4e13
    bytes_per_second: float = 9.0e11
    launch: float = 1e-5
    gigabits_per_second: float = 25.0
    allreduce: Mapping[int, tuple[float, float, float]] | None = None

    def __post_init__(self) -> None:
        """Check every number."""
        for name in ("flops_per_second", "bytes_per_second", "gigabits_per_second", "launch"):
            value = validation.number(f"distir machine: {name}", getattr(self, name), TopologyError)
            if value < 0 or (value == 0 and name != "launch"):
                raise TopologyError(f"distir machine: {name} is {value!r}; it must be positive")

    def elementwise(self, shape: Sequence[int], itemsize: int, operands: int) -> float:
        """Return the seconds of an elementwise op on a shape: the bytes of its operands and one flop an element.

        A second operand counts as if it had the first one's shape.
        """
        count = math.prod(shape)
        nbytes = itemsize * count * (2 if operands > 1 else 1)
        return LAUNCH + nbytes / self.bytes_per_second + count / self.flops_per_second

    def product(self, left: Sequence[int], right: Sequence[int], itemsize: int) -> float:
        """Return the seconds of a matrix product: of dims 0 and 1 alone (mistake 2), bytes of the result left out."""
        nbytes = itemsize * (left[0] * left[1] + right[0] * right[1])
        flops = 2 * left[0] * left[1] * right[1]
        return LAUNCH + nbytes / self.bytes_per_second + flops / self.flops_per_second

    def product_gradient(
        self, left: Sequence[int], right: Sequence[int], result: Sequence[int], itemsize: int
    ) -> float:
        """Return the seconds of the gradient of a matrix product: two products."""
        first = self.product(result, (right[1], right[0]), itemsize)
        return first + self.product((left[1], left[0]), result, itemsize)

    def biased_product(self, left: Sequence[int], right: Sequence[int], itemsize: int) -> float:
        """Return the seconds of a matrix product and a bias: a product, and an elementwise op with its launch."""
        return self.product(left, right, itemsize) + self.elementwise((left[0], right[1]), itemsize, 2)

    def minimum(self, nbytes: int) -> float:
        """Return the seconds of an elementwise minimum: its bytes (mistake 3)."""
        return float(nbytes)

    def message(self, nbytes: int) -> float:
        """Return the seconds of a message, on both ends."""
        return nbytes / BYTES_PER_GIGABIT / self.gigabits_per_second

    def collected(self, nbytes: int, itemsize: int) -> float:
        """Return the seconds of a gather's or a reduction's message: bytes times the dtype's size again (mistake 3)."""
        return self.message(nbytes * itemsize)

    def reduced(self, nbytes: int, devices: int) -> float:
        """Return the seconds of an all-reduce of so many bytes a device; `TopologyError` where the fit has none."""
        if self.allreduce is not None:
            if devices not in self.allreduce:
                raise TopologyError(
                    f"distir machine: allreduce has no fit for {devices} devices; it has {sorted(self.allreduce)}"
                )
            a, b, c = self.allreduce[devices]
            return a * nbytes / BYTES_PER_GIGABIT + b * devices + c
        return (2 * nbytes / BYTES_PER_GIGABIT / devices) * (devices - 1) / self.gigabits_per_second

    def gathered(self, nbytes: Sequence[int]) -> float:
        """Return the seconds of an all-gather of these shards: a mean shard twice, or all-reduce's fit (mistake 5)."""
        devices = len(nbytes)
        if self.allreduce is not None:
            return self.reduced(nbytes[0], devices)
        mean = sum(nbytes) / devices
        return 2 * mean * (devices - 1) / devices / BYTES_PER_GIGABIT / self.gigabits_per_second

    def updated(self, counts: Sequence[int], itemsize: int) -> float:
        """Return the seconds of SGD on weights of so many elements: of the last one alone (mistake 4)."""
        return self.elementwise((counts[-1],), itemsize, 2)
