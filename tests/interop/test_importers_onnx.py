"""ONNX models: what torch exports, a Slice of five inputs at opset 10, data that lies outside, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.interop.test_importers_torch import NAMES, flops, gpt, llama, times, tokens
from tests.interop.torch_decoders import OpenGain

from shardplan.core.reference import run_reference
from shardplan.errors import ParseError, ShardplanError, TypingError
from shardplan.interop.importers import load
from shardplan.strategy import Model

onnx: Any = pytest.importorskip("onnx")
pytest.importorskip("onnx.reference")
helper: Any = onnx.helper
FLOAT, INT = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def run(model: Model, proto: Any, **inputs: np.ndarray) -> list[np.ndarray]:
    checkpoint = {x.name: onnx.numpy_helper.to_array(x) for x in proto.graph.initializer}
    held = {name for p in model.parameters.values() for _, name in p.names()}
    values = model.pack({n: x for n, x in checkpoint.items() if n in held}) | inputs | dict(model.constants)
    found = run_reference(model.program, [[values[n]] for n, _ in model.program.inputs])
    return [shards[0] for shards in found]


@pytest.mark.parametrize("make", [gpt, lambda: llama(norm=OpenGain)], ids=["gpt", "llama"])
@pytest.mark.filterwarnings("ignore")
def test_what_torch_exports_is_what_torch_computes(make: Any, tmp_path: Path) -> None:
    module, ids, path = make().float(), tokens(17, 2, 7), tmp_path / "model.onnx"
    torch.onnx.export(module, (ids,), path, dynamo=False, opset_version=14, input_names=["ids"],
                      do_constant_folding=False)  # fmt: skip
    model = load(path, NAMES)
    (found,) = run(model, onnx.load(path), ids=ids.numpy())
    wanted = module(ids).detach().numpy()
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    layers = len(module.blocks)
    assert times(model.program) == [layers]
    assert str(model.program).count("= attention(") == 1
    assert model.parameter_count == sum(p.numel() for p in module.parameters())
    exported = load(torch.export.export(module, (ids,)), NAMES)
    assert flops(model.program) == pytest.approx(flops(exported.program), rel=0.02)


def proto_of(nodes: list[Any], outputs: int = 1, opset: int = 10, weights: dict[str, np.ndarray] | None = None) -> Any:
    given = [helper.make_tensor_value_info("x", FLOAT, [4, 6])]
    made = [helper.make_tensor_value_info("y", FLOAT, None)]
    held = [onnx.numpy_helper.from_array(a, n) for n, a in (weights or {}).items()]
    graph = helper.make_graph(nodes, "g", given, made, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def test_a_slice_of_five_inputs() -> None:
    ends = {n: np.asarray(v) for n, v in {"a": [1, -3], "b": [9, -1], "d": [0, 1], "s": [1, 1]}.items()}
    proto = proto_of([helper.make_node("Slice", ["x", "a", "b", "d", "s"], ["y"])], weights=ends)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype("f4")
    assert np.array_equal(run(load(proto), proto, x=x)[0], x[1:9, -3:-1])


# One operation of x [4, 6], attributes, the other inputs, and the opset where another than 13 means something else.
OPERATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "transpose without an order": ("Transpose", {}, {}, 13),
    "reshape that keeps a size": ("Reshape", {}, {"to": [0, 2, -1]}, 13),
    "flatten": ("Flatten", {"axis": 0}, {}, 13),
    "gather from the end": ("Gather", {"axis": 1}, {"at": -2}, 13),
    "gather neighbours": ("Gather", {"axis": 1}, {"at": [2, 3, 4]}, 13),
    "gather rows": ("Gather", {}, {"at": [3, 0, 0]}, 13),
    "softmax of old": ("Softmax", {}, {}, 11),
    "softmax": ("Softmax", {"axis": 0}, {}, 13),
    "mean of a dim": ("ReduceMean", {"axes": [1], "keepdims": 0}, {}, 13),
    "greatest of all": ("ReduceMax", {}, {}, 13),
    "power": ("Pow", {}, {"by": np.float32(3)}, 13),
    "power of a number": ("Pow", {}, {"by": np.float32(2)}, 13),
    "expand": ("Expand", {}, {"to": [2, 1, 6]}, 13),
    "least": ("Min", {}, {"with": np.float32(0.25)}, 13),
    "erf": ("Erf", {}, {}, 13),
    "gelu": ("Gelu", {"approximate": "tanh"}, {}, 20),
    "product with a turned factor": ("Gemm", {"transB": 1}, {"w": np.arange(18, dtype="f4").reshape(3, 6)}, 13),
    "layer norm": ("LayerNormalization", {"epsilon": 0.1}, {"gain": np.arange(6, dtype="f4")}, 17),
    "einsum": ("Einsum", {"equation": "ab, bc -> ca"}, {"w": np.arange(12, dtype="f4").reshape(6, 2)}, 13),
    "unsqueeze": ("Unsqueeze", {}, {"axes": [0, -1]}, 13),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_the_standard(name: str) -> None:
    """As the reference evaluator of ONNX computes it."""
    kind, attributes, others, opset = OPERATIONS[name]
    weights = {n: np.asarray(v) for n, v in others.items()}
    proto = proto_of([helper.make_node(kind, ["x", *weights], ["y"], **attributes)], opset=opset, weights=weights)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype("f4")
    (wanted,) = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})
    (found,) = run(load(proto), proto, x=x)
    assert found.shape == wanted.shape and np.abs(found - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max())


def test_shapes_are_folded() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["n"], axis=0),
        helper.make_node("Div", ["n", "two"], ["half"]),
        helper.make_node("Unsqueeze", ["half"], ["h"], axes=[0]),
        helper.make_node("Concat", ["minus", "h"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["z"]),
        helper.make_node("Relu", ["z"], ["y"]),
    ]
    weights = {"one": np.asarray(1), "two": np.asarray(2), "minus": np.asarray([-1])}
    model = load(proto_of(nodes, weights=weights))
    assert [s.op.name for s in model.program.steps] == ["reshape", "elementwise", "reshape"]
    assert model.program.output_types[0].shape == (8, 3)


def test_data_outside_is_not_read(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(6, 300)).astype("f4")
    proto = proto_of([helper.make_node("MatMul", ["x", "w"], ["y"])], weights={"w": weight})
    path = tmp_path / "far.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="far.data", size_threshold=0)
    (tmp_path / "far.data").unlink()
    model = load(path)
    assert model.parameter_count == weight.size
    assert model.parameters["w"].file == "w"


def test_what_is_refused() -> None:
    nodes = [
        helper.make_node(n, [a], [b]) for n, a, b in (("Hardmax", "x", "p"), ("Hardmax", "p", "q"), ("Mish", "q", "y"))
    ]
    with pytest.raises(TypingError) as error:
        load(proto_of(nodes))
    assert "Hardmax, 2 times, first at node 0, p" in str(error.value)
    assert "Mish, 1 times" in str(error.value)
    with pytest.raises(TypingError, match=r"  Mish.*, 1 times, first at node 0, y$") as error:
        load(proto_of([helper.make_node("Mish\nof two lines", ["x"], ["y"])]))
    assert str(error.value).count("\n") == 1
    with pytest.raises(ShardplanError, match="opset"):
        load(proto_of([helper.make_node("Relu", ["x"], ["y"])], opset=9))


def test_files_that_are_no_model(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    for data, reason in ((b"\xff", "is no ONNX model: Error parsing message"), (None, "cannot read ")):
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        with pytest.raises(ParseError) as error:
            load(path)
        assert reason in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_names_and_tensors_that_say_nothing() -> None:
    relu = helper.make_node("Relu", ["x"], ["y"])
    cases: list[tuple[Any, str]] = []
    cases.append(
        (proto_of([helper.make_node("Relu", ["z"], ["y"])]), "load: node 0, y takes 'z', which no input and no")
    )
    cases.append((proto_of([helper.make_node("Relu", ["x"], ["z"])]), "load: the graph's output takes 'y', which no"))
    ends = {"n": np.asarray([2, 3])}
    far, short, strange = (proto_of([relu], weights=ends) for _ in range(3))
    far.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    short.graph.initializer[0].raw_data = b"1"
    strange.graph.initializer[0].data_type = 99
    cases += [(far, "load: 'n' has data outside the ONNX model"), (short, "load: the ONNX tensor 'n' of shape [2]: ")]
    cases.append((strange, "load: a tensor of the ONNX dtype 99; legal are those with a numpy dtype"))
    raw = proto_of([relu]).SerializeToString()
    strange_name = onnx.ModelProto.FromString(raw.replace(b"\x01x", b"\x01\xff"))
    cases.append((strange_name, "load: a value is called b'\\xff'; legal are names in UTF-8"))
    for proto, message in cases:
        with pytest.raises(ParseError) as error:
            load(proto)
        assert str(error.value).startswith(message) and "\n" not in str(error.value)
