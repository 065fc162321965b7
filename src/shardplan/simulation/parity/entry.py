"""`distir` and `distir_listing`: what DistIR's simulator says of a configuration, and the program it says it of."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.errors import LayoutError
from shardplan.simulation.parity.gpt import gpt_graph
from shardplan.simulation.parity.graph import DistirBlock, DistirGraph, GraphWriter
from shardplan.simulation.parity.machine import LAUNCH, DistirMachine
from shardplan.simulation.parity.points import DistirPoint
from shardplan.simulation.parity.program import DistirProgram, distir_program
from shardplan.simulation.parity.replay import DistirResult, ListedAction, replayed, unrolled


def compiled(point: DistirPoint, machine: DistirMachine) -> DistirProgram:
    """Return a configuration's program.

    Args:
        point: One on which DistIR does not fail.
        machine: What prices it.

    Raises `LayoutError` where DistIR fails.
    """
    if failure := point.failure():
        raise LayoutError(f"distir: {point} has no program, DistIR fails on it: {failure}")
    sizes = point.sizes
    if sizes.heads:
        graph = gpt_graph(machine, sizes.layers, sizes.heads, sizes.hidden, point.rows, point.tensor, point.pipeline)
    else:
        graph = mlp_graph(machine, sizes.layers, sizes.hidden, point.rows, point.tensor, point.pipeline)
    return distir_program(graph, machine, point.data, point.tensor, point.pipeline, point.microbatches)


def distir(point: DistirPoint, machine: DistirMachine | None = None) -> DistirResult:
    """Return what DistIR's simulator says of a configuration, its mistakes kept.

    Args:
        point: The configuration: an MLP is trained, a GPT runs forward only.
        machine: The machine; DistIR's default.

    Returns:
        Seconds of the latest device and bytes of the fullest, equal to DistIR's; -1 and why where DistIR fails.

    Source: microsoft/dist-ir 7cfa1b0 (arXiv 2111.05426).

    >>> distir(DistirPoint("mlp-small", global_batch=64))
    DistirResult(seconds=0.04069380533434918, peak_bytes=8600420356, failure=None)
    """
    if failure := point.failure():
        return DistirResult(-1.0, -1, failure)
    return replayed(compiled(point, machine or DistirMachine()))


def distir_listing(point: DistirPoint, machine: DistirMachine | None = None) -> Iterator[ListedAction]:
    """Yield the ops of DistIR's program in its order, on every device; inputs are where they are used before the first.

    Args:
        point: The configuration.
        machine: The machine; DistIR's default.

    Raises `LayoutError` where DistIR fails.

    Source: microsoft/dist-ir 7cfa1b0.

    >>> [action.kind for action in distir_listing(DistirPoint("mlp-xs"))][:3]
    ['MatMul', 'Relu', 'MatMul']
    """
    return unrolled(compiled(point, machine or DistirMachine()))


# DistIR's MLP: square layers of a product and a ReLU, a loss, their gradients, and SGD.
#
# Tensor parallelism cuts the weights by columns and by rows in turn, and adds up the result of every second product,
# forward and backward alike.
#
# Source: microsoft/dist-ir 7cfa1b0, `examples/mlp.py` and `transforms/mlp_dhp_transform.py`.


def mlp_graph(machine: DistirMachine, layers: int, width: int, batch: int, tensor: int, pipeline: int) -> DistirGraph:
    """Return the MLP for a microbatch of `batch` rows.

    Args:
        machine: What prices its ops.
        layers: Of the model; the pipeline degree divides them.
        width: Features of every layer; the tensor degree divides them.
        batch: Rows.
        tensor: Tensor degree.
        pipeline: Pipeline degree.

    Source: microsoft/dist-ir 7cfa1b0, `examples/mlp.py`.

    >>> len(mlp_graph(DistirMachine(), 4, 8, 2, 1, 1).ops)
    18
    """
    write = GraphWriter(machine)
    x = write.value((batch, width))
    labels = write.value((batch, width))
    rows = write.value(())
    part = width // tensor
    weights = [write.value((width, part) if k % 2 == 0 else (part, width)) for k in range(layers)]
    inner, outputs = [x], list[int]()
    products = 0
    for weight in weights:
        left, right = write.shape(inner[-1]), write.shape(weight)
        products += 1
        y = write.value((left[0], right[1]))
        seconds = machine.product(left, right, write.itemsize)
        write.op("MatMul", (inner[-1], weight), y, seconds, tensor > 1 and products % 2 == 0)
        outputs.append(y)
        inner.append(write.elementwise("Relu", y))
    # Mistake 3: both cost an elementwise op on the labels alone.
    seconds = machine.elementwise(write.shape(labels), write.itemsize, 1)
    result = write.values[inner[-1]]
    loss = write.costing("Loss", (inner[-1], labels, rows), result, seconds)
    flow = write.costing("LossGrad", (inner[-1], labels, rows), result, seconds)
    gradients = [0] * layers
    for k in reversed(range(layers)):
        local = write.costing(
            "ReluGrad", (outputs[k], flow), write.values[outputs[k]],
            machine.elementwise(write.shape(outputs[k]), write.itemsize, 2),
        )  # fmt: skip
        products += 1
        shapes = [write.shape(v) for v in (inner[k], weights[k], local)]
        flow, gradients[k] = write.value(shapes[0]), write.value(shapes[1])
        seconds = machine.product_gradient(shapes[0], shapes[1], shapes[2], write.itemsize)
        both = (flow, gradients[k])
        write.op("MatMulGrad", (inner[k], weights[k], local), both, seconds, tensor > 1 and products % 2 == 0)
    each, half = 2 * layers // pipeline, 2 * layers + 2
    forward = [DistirBlock(k * each, (k + 1) * each + (2 if k == pipeline - 1 else 0), k) for k in range(pipeline)]
    backward = [
        DistirBlock(half + k * each, half + (k + 1) * each, pipeline - 1 - k, backward=True) for k in range(pipeline)
    ]
    sums = {g: machine.elementwise(write.shape(g), write.itemsize, 2) for g in gradients}
    # In the order in which the graph makes them; the gradient of the input stands before its layer's weight.
    made = [loss, *reversed(gradients[1:]), flow, gradients[0]]
    return DistirGraph(
        tuple(write.values), tuple(write.ops), (*forward, *backward),
        tuple((v, "Add", sums[v]) if v in sums else (v, "Concat", LAUNCH) for v in made),
        frozenset((x, labels)), tuple(weights), tuple(gradients),
    )  # fmt: skip
