"""DistIR's MLP: square layers of a product and a ReLU, a loss, their gradients, and SGD.

Tensor parallelism cuts the weights by columns and by rows in turn, and adds up the result of every second product,
forward and backward alike.

Source: microsoft/dist-ir 7cfa1b0, `examples/mlp.py` and `transforms/mlp_dhp_transform.py`.
"""

from __future__ import annotations

from shardplan.simulation.parity.graph import DistirBlock, DistirGraph, GraphWriter
from shardplan.simulation.parity.machine import LAUNCH, DistirMachine


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
