"""DistIR's GPT: the forward pass of GPT-2 as ONNX's model zoo has it, widened and lengthened to other sizes.

The zoo's `gpt2-10` was exported from `transformers` in 2020 with every extent of every shape read from the tensor: four
fifths of its ops handle shapes. DistIR repeats its last block for models of more layers, which therefore share that
block's constants. Sequences have 8 tokens. Tensor parallelism cuts attention and MLP as Megatron does, and adds up the
results of the two projections; a head count that the degree does not divide is rounded down, the heads grow wider.

Source: microsoft/dist-ir 7cfa1b0, `examples/gpt2.py` and `transforms/gpt2_dhp_transform.py`; onnx/models, gpt2-10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardplan.simulation.parity.graph import DistirBlock, DistirGraph, DistirValue, GraphWriter
from shardplan.simulation.parity.machine import LAUNCH, DistirMachine

TOKENS, VOCABULARY, POSITIONS, EXPORTED_LAYERS = 8, 50257, 1024, 12


@dataclass(slots=True)
class _Export:
    """The exported graph in the making."""

    write: GraphWriter
    layers: int
    tensor: int
    cuts: list[int] = field(default_factory=list[int])  # where blocks end
    shared: list[int] = field(default_factory=list[int])  # the constants of the last exported block
    used: int = 0  # constants of this block so far

    def number(self, kind: str, operands: Sequence[int], count: int | tuple[int, ...], seconds: float = LAUNCH) -> int:
        """An op that makes numbers."""
        shape = (count,) if isinstance(count, int) else count
        return self.write.costing(kind, operands, DistirValue(shape, 8, known=True), seconds)

    def written(self) -> int:
        """A constant that an op writes, for nothing."""
        return self.number("Constant", (), (), 0.0)

    def stored(self) -> int:
        """A constant that is an input of the function; later blocks share those of the last exported one."""
        block, self.used = len(self.cuts), self.used + 1
        if EXPORTED_LAYERS <= block < self.layers:
            return self.shared[self.used - 1]
        value = self.write.value((1,), 8, known=True)
        if block == EXPORTED_LAYERS - 1:
            self.shared.append(value)
        return value

    def cut(self) -> None:
        """End a block."""
        self.cuts.append(len(self.write.ops))
        self.used = 0

    def extent(self, x: int) -> int:
        """One extent of a tensor's shape."""
        whole = self.number("Shape", (x,), len(self.write.shape(x)))
        return self.number("Gather", (whole, self.written()), ())

    def row(self, number: int) -> int:
        """A number as a row of one."""
        return self.number("Unsqueeze", (number,), 1)

    def reshaped(self, x: int, rows: Sequence[int], shape: tuple[int, ...]) -> int:
        """A tensor in another shape, which is put together of rows."""
        joined = self.number("Concat", rows, len(rows))
        return self.write.launched("Reshape", (x, joined), DistirValue(shape, self.write.values[x].itemsize))

    def normed(self, x: int, hidden: int) -> int:
        """Layer norm, with its gain and bias."""
        write, shape = self.write, self.write.shape(x)
        gain, bias = write.value((hidden,)), write.value((hidden,))
        one = DistirValue((*shape[:-1], 1), 4)
        seconds = write.machine.elementwise(shape, 4, 1)
        mean = write.costing("ReduceMean", (x,), one, seconds)
        centred = write.elementwise("Sub", x, mean)
        square = write.elementwise("Pow", centred, self.written())
        variance = write.costing("ReduceMean", (square,), one, seconds)
        root = write.elementwise("Sqrt", write.elementwise("Add", variance, self.written()))
        scaled = write.elementwise("Mul", write.elementwise("Div", centred, root), gain)
        return write.elementwise("Add", scaled, bias)

    def projected(self, x: int, width: int, summed: bool = False, ends: bool = False) -> int:
        """A product with a weight of so many columns, and a bias; a block may end behind the product."""
        write, (batch, tokens, inner) = self.write, self.write.shape(x)
        extents = [self.extent(x) for _ in range(3)]
        flat = self.reshaped(x, [self.stored(), self.row(extents[2])], (batch * tokens, inner))
        weight, bias = write.value((inner, width)), write.value((width,))
        y = write.value((batch * tokens, width))
        seconds = write.machine.biased_product((batch * tokens, inner), (inner, width), 4)
        write.op("Gemm", (flat, weight, bias), y, seconds, summed and self.tensor > 1)
        if ends:
            self.cut()
        return self.reshaped(y, [self.row(extents[0]), self.row(extents[1]), self.stored()], (batch, tokens, width))

    def headed(self, x: int, heads: int, order: Sequence[int]) -> int:
        """Queries, keys or values by heads, their dims in this order."""
        batch, tokens, inner = self.write.shape(x)
        extents = [self.extent(x) for _ in range(3)]
        wide = self.number("Div", (extents[2], self.written()), (), 0.0)
        wide = self.number("Cast", (self.number("Cast", (wide,), (), 0.0),), (), 0.0)
        rows = [self.row(extents[0]), self.row(extents[1]), self.stored(), self.row(wide)]
        return self.turned(self.reshaped(x, rows, (batch, tokens, heads, inner // heads)), order)

    def turned(self, x: int, order: Sequence[int]) -> int:
        """A tensor with its dims in another order."""
        shape = self.write.shape(x)
        seconds = self.write.machine.elementwise(shape, 4, 1)
        return self.write.costing("Transpose", (x,), DistirValue(tuple(shape[k] for k in order), 4), seconds)

    def multiplied(self, left: int, right: int) -> int:
        """A product of tensors of four dims."""
        a, b = self.write.shape(left), self.write.shape(right)
        seconds = self.write.machine.product(a, b, 4)
        return self.write.costing("MatMul", (left, right), DistirValue((*a[:3], b[3]), 4), seconds)

    def attended(self, x: int, hidden: int, heads: int) -> int:
        """Attention to the tokens before, with its projections."""
        write, inner = self.write, hidden // self.tensor
        batch, tokens = write.shape(x)[:2]
        triangle = write.value((1, 1, POSITIONS, POSITIONS))
        fused = self.projected(x, 3 * inner)
        parts = tuple(write.value((batch, tokens, inner)) for _ in range(3))
        write.op("Split", (fused,), parts, LAUNCH)
        query = self.headed(parts[0], heads, (0, 2, 1, 3))
        key = self.headed(parts[1], heads, (0, 2, 3, 1))
        value = self.headed(parts[2], heads, (0, 2, 1, 3))
        scores = write.elementwise("Div", self.multiplied(query, key), self.written())
        mask = self.masked(scores, triangle)
        kept = write.elementwise("Mul", scores, mask)
        # A number minus a tensor has no cost.
        other = write.costing("Sub", (self.written(), mask), write.values[mask], 0.0)
        away = write.elementwise("Mul", other, self.written())
        weights = write.elementwise("Softmax", write.elementwise("Sub", kept, away))
        mixed = self.turned(self.multiplied(weights, value), (0, 2, 1, 3))
        extents = [self.extent(mixed) for _ in range(4)]
        wide = self.number("Mul", extents[2:], (), 0.0)
        shape = write.shape(mixed)
        rows = [self.row(extents[0]), self.row(extents[1]), self.row(wide)]
        merged = self.reshaped(mixed, rows, (batch, tokens, shape[2] * shape[3]))
        return self.projected(merged, hidden, summed=True)

    def masked(self, scores: int, triangle: int) -> int:
        """The part of the triangle that belongs to these tokens."""
        tokens = self.write.shape(scores)[2]
        rows, columns = self.extent(scores), self.extent(scores)
        start = self.number("Sub", (columns, rows), (), 0.0)
        bounds = (self.row(start), self.row(columns), self.stored(), self.written())
        like = DistirValue((1, 1, tokens, POSITIONS), 4)
        some = self.write.launched("Slice", (triangle, *bounds), like)
        ends = (self.row(columns), self.stored(), self.stored(), self.written())
        return self.write.launched("Slice", (some, *ends), DistirValue((1, 1, tokens, tokens), 4))

    def activated(self, x: int) -> int:
        """GELU by a hyperbolic tangent."""
        write = self.write
        half = write.elementwise("Mul", x, self.written())
        cubed = write.elementwise("Mul", write.elementwise("Pow", x, self.written()), self.written())
        inner = write.elementwise("Mul", write.elementwise("Add", x, cubed), self.written())
        above = write.elementwise("Add", write.elementwise("Tanh", inner), self.written())
        return write.elementwise("Mul", half, above)

    def embedded(self, batch: int, hidden: int) -> tuple[int, list[int], int]:
        """The tokens and their positions as vectors; the extents of the input; the input."""
        write = self.write
        tokens = write.value((batch, 1, TOKENS), 8)
        extents = [self.extent(tokens) for _ in range(3)]
        length = self.row(extents[2])
        ids = self.reshaped(tokens, [self.stored(), length], (batch, TOKENS))
        step, first = self.stored(), self.stored()
        long = self.number("Sub", (self.row(extents[2]), first), 1, 0.0)
        long = self.number("Div", (long, step), 1, 0.0)
        ones = self.number("ConstantOfShape", (long,), TOKENS)
        turned = self.number("NonZero", (ones,), (1, TOKENS))
        whole = write.machine.elementwise((TOKENS,), 8, 1)
        turned = self.number("Transpose", (turned,), (TOKENS, 1), whole)
        line = self.number("Mul", (self.number("Squeeze", (turned,), TOKENS), step), TOKENS, 0.0)
        line = self.number("Add", (line, first), TOKENS, write.machine.elementwise((TOKENS,), 8, 2))
        line = self.number("Unsqueeze", (self.number("Cast", (line,), TOKENS, 0.0),), (1, TOKENS))
        length = self.row(extents[2])
        joined = self.number("Concat", (self.stored(), length), 2)
        positions = self.number("Reshape", (line, joined), (1, TOKENS))
        table, places = write.value((VOCABULARY, hidden)), write.value((POSITIONS, hidden))
        words = write.launched("Gather", (table, ids), DistirValue((batch, TOKENS, hidden), 4))
        where = write.launched("Gather", (places, positions), DistirValue((1, TOKENS, hidden), 4))
        return write.elementwise("Add", words, where), extents, tokens


def gpt_graph(
    machine: DistirMachine, layers: int, heads: int, hidden: int, batch: int, tensor: int, pipeline: int
) -> DistirGraph:
    """Return the forward pass for a microbatch of `batch` sequences.

    Args:
        machine: What prices its ops.
        layers: Any number; the exported model has 12.
        heads: Of attention; at least the tensor degree.
        hidden: Features; four times as many inside an MLP.
        batch: Sequences, of 8 tokens.
        tensor: Tensor degree, which divides `hidden`.
        pipeline: Pipeline degree. Blocks end behind an MLP's second product, the last ops are one more; the first
            places take one block more where the degree does not divide their number.

    Source: microsoft/dist-ir 7cfa1b0, `examples/gpt2.py`, `transforms/gpt2_dhp_transform.py`.

    >>> graph = gpt_graph(DistirMachine(), 12, 12, 768, 1, 1, 1)
    >>> len(graph.blocks), len(graph.ops)
    (13, 2533)
    """
    write = GraphWriter(machine)
    export = _Export(write, layers, tensor)
    x, extents, tokens = export.embedded(batch, hidden)
    width = export.extent(x)
    for _ in range(layers):
        x = write.elementwise("Add", x, export.attended(export.normed(x, hidden), hidden, heads // tensor))
        inner = export.projected(export.normed(x, hidden), 4 * hidden // tensor)
        x = write.elementwise("Add", x, export.projected(export.activated(inner), hidden, summed=True, ends=True))
    x = export.normed(x, hidden)
    rows = [export.row(number) for number in (*extents, width)]
    x = export.reshaped(x, rows, (batch, 1, TOKENS, hidden))
    export.cut()
    starts = [0, *export.cuts[:-1]]
    fewest, more = divmod(len(starts), pipeline)
    places = [k for k in range(pipeline) for _ in range(fewest + (k < more))]
    blocks = tuple(DistirBlock(a, b, k) for a, b, k in zip(starts, export.cuts, places, strict=True))
    return DistirGraph(tuple(write.values), tuple(write.ops), blocks, ((x, "Concat", LAUNCH),), frozenset((tokens,)))
