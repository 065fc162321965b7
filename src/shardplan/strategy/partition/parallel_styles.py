"""`ParallelStyles`: what is column-parallel, row-parallel or cut by the vocabulary, in the words of those who know.

Names are a model's (`layers.gate`), or its checkpoint's, with or without `.weight`; a pattern may leave out how a name
begins, as the plans of torch's `parallelize_module` do, which are of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardplan.core import validation
from shardplan.errors import LayoutError, excerpt

COLUMN, ROW, VOCAB, WHOLE = "column", "row", "vocab", "whole"
# torch.distributed.tensor.parallel's classes, and torchtitan's: what of a module's parameters they say. Those that lay
# activations say nothing of parameters: here activations lie as is cheapest.
_OF_TORCH = {
    "ColwiseParallel": COLUMN,
    "RowwiseParallel": ROW,
    "SequenceParallel": WHOLE,
    "NoParallel": WHOLE,
    "Float8ColwiseParallel": COLUMN,
    "Float8RowwiseParallel": ROW,
    "PrepareModuleInput": "",
    "PrepareModuleOutput": "",
    "PrepareModuleInputOutput": "",
    "PrepareFloat8ModuleInput": "",
}


class ParallelStyle(NamedTuple):
    """How the parameters of some names lie: `column`, `row`, `vocab` or `whole`, over an axis."""

    kind: str
    patterns: tuple[str, ...]
    axis: str = "tensor"

    def __str__(self) -> str:
        """Return it as it is called."""
        return f"{self.kind}({', '.join(map(repr, self.patterns))})"


@dataclass(frozen=True, slots=True)
class ParallelStyles:
    """Styles, of which the last that matches a parameter counts; what none matches is as the strategy has it.

    >>> print(ParallelStyles().column("*.gate", "*.up").row("*.down"))
    column('*.gate', '*.up').row('*.down')
    """

    styles: tuple[ParallelStyle, ...] = ()
    sequence: bool = False  # whether the axis takes the sequence where it has nothing else to take

    def column(self, *patterns: str, axis: str = "tensor") -> ParallelStyles:
        """Add parameters whose output features an axis cuts: of heads the heads, of a bias all."""
        return self._add(COLUMN, patterns, axis)

    def row(self, *patterns: str, axis: str = "tensor") -> ParallelStyles:
        """Add parameters whose input features an axis cuts, of a table its rows; a bias is whole."""
        return self._add(ROW, patterns, axis)

    def vocab(self, *patterns: str, axis: str = "tensor") -> ParallelStyles:
        """Add tables whose rows an axis cuts, and heads whose classes it cuts."""
        return self._add(VOCAB, patterns, axis)

    def whole(self, *patterns: str, axis: str = "tensor") -> ParallelStyles:
        """Add parameters that an axis does not cut."""
        return self._add(WHOLE, patterns, axis)

    @staticmethod
    def of_torch(plan: Mapping[str, Any], axis: str = "tensor") -> ParallelStyles:
        """Read a plan of torch's `parallelize_module`, as torchtitan's are: names of modules to parallel styles.

        How a plan lays activations is left out: here they lie as is cheapest.

        Raises `LayoutError` for a style of another class.
        """
        found = ParallelStyles()
        for name, style in validation.table("a plan of parallelize_module", plan, "names of modules to styles").items():
            classes = [c.__name__ for c in type(style).__mro__]
            kind = next((_OF_TORCH[c] for c in classes if c in _OF_TORCH), None)
            if kind is None:
                raise LayoutError(
                    f"a plan of parallelize_module: {excerpt(name)} is {classes[0]}; legal are {', '.join(_OF_TORCH)}"
                )
            if kind:
                found = found._add(kind, (name or "*",), axis)
            found = ParallelStyles(found.styles, found.sequence or "SequenceParallel" in classes)
        return found

    def __str__(self) -> str:
        """Return the calls."""
        return ".".join(map(str, self.styles))

    def _add(self, kind: str, patterns: Iterable[str], axis: str) -> ParallelStyles:
        names = validation.names(f"layouts: {kind}", tuple(patterns))
        if not names:
            raise LayoutError(f"layouts: {kind} of no names; legal are patterns such as '*.gate'")
        return ParallelStyles((*self.styles, ParallelStyle(kind, names, axis)), self.sequence)
