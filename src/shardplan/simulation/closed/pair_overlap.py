"""What exchanges of tokens with experts do not cost where a forward and a backward of two microbatches run together.

DualPipe cuts the layers of both into attention, dispatch, products and combine, and has one microbatch's tokens under
way while the other one computes (DeepSeek-V3, arXiv 2412.19437, section 3.2.1); so does Megatron-Core's combined 1F1B
(`--overlap-moe-expert-parallel-comm`). Where prompts are read, two forward passes go so in turn (DeepSeek-V3, section
3.4.1). A pair then takes the longer of what both compute and what both exchange, not their sum; other movements hide
nothing. Exchanges keep some processors from products and attention for as long as they run beside them. A pass is taken
for one of a pair with the other pass of its own chunk: ranks have chunks alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardplan.simulation.closed.pass_overlap import PassWork, beside_moves

Floats = np.ndarray
# Processors of a device that exchanges keep: 20 of an H800's 132 (DeepSeek-V3, arXiv 2412.19437, section 3.2.2), as
# many as the deepseek-ai/DeepEP kernels take by default.
EXCHANGERS = 20


class PairedPass(NamedTuple):
    """Seconds of one pass: of its kernels, of those that all processors are needed for, and of its exchanges."""

    kernels: Floats
    slowed: Floats
    exchanged: Floats

    def sum_parts(self, sums: Callable[[Floats], Floats]) -> PairedPass:
        """Return the same with each of them summed over what a pass consists of."""
        return PairedPass(sums(self.kernels), sums(self.slowed), sums(self.exchanged))


def hidden_exchanges(forward: PairedPass, backward: PairedPass, processors: int) -> tuple[Floats, Floats]:
    """Return the seconds that a forward, and a backward, takes less in a pair than alone.

    Both are shares of what the pair hides, by what each exchanges: at most that, and what kernels lose is taken off.

    Args:
        forward: A forward pass, arrays of any shape.
        backward: A backward pass of the same chunk; or another forward pass, where nothing is trained.
        processors: Those of a device; 0 where they are not known, and kernels lose nothing.

    >>> one, two = (PairedPass(*(np.array([x]) for x in each)) for each in ((2.0, 0.0, 1.0), (4.0, 0.0, 1.0)))
    >>> [float(x[0]) for x in hidden_exchanges(one, two, 132)]
    [1.0, 1.0]
    """
    kernels, slowed, exchanged = (a + b for a, b in zip(forward, backward, strict=True))
    beside = beside_moves(PassWork(kernels, exchanged, np.zeros_like(exchanged)), slowed, processors, EXCHANGERS)
    hidden = np.clip(kernels + exchanged - np.maximum(beside.kernels, exchanged), 0.0, exchanged)
    share = np.divide(hidden, exchanged, out=np.zeros_like(exchanged), where=exchanged > 0)
    return forward.exchanged * share, backward.exchanged * share
