"""Functions of JAX and models of ONNX with inputs, for `import_sweep`, from one primitive to small layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax, nn
from onnx import helper, numpy_helper

Arrays = dict[str, Any]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Return normal numbers."""
    return np.random.default_rng(seed).normal(size=shape)


def _norm(x: Any, gain: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gain


def _attention(x: Any, by: float, causal: bool) -> Any:
    scores = jnp.einsum("sd,td->st", x, x) * by
    scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf) if causal else scores
    return nn.softmax(scores) @ x


def _rotated(x: Any) -> Any:
    n = x.shape[-1] // 2
    angle = jnp.outer(jnp.arange(x.shape[0]), 10000.0 ** (-jnp.arange(n) / n))
    a, b = x[:, :n], x[:, n:]
    return jnp.concatenate((a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)), -1)


def functions() -> dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]]:
    """Return functions of JAX by name, with arrays in f64."""
    x, w, b = numbers(4, 8), numbers(8, 6, seed=1), numbers(6, seed=2)
    of_one: dict[str, Callable[[Any], Any]] = {
        **{name: getattr(nn, name) for name in (
            "relu", "relu6", "sigmoid", "softplus", "soft_sign", "silu", "log_sigmoid", "leaky_relu", "elu", "celu",
            "selu", "glu", "squareplus", "mish", "hard_tanh", "hard_sigmoid", "hard_silu", "softmax", "log_softmax",
            "logsumexp", "standardize")},
        **{f"jnp.{name}": getattr(jnp, name) for name in (
            "exp", "expm1", "tanh", "sin", "square", "sign", "floor", "round", "cumsum", "cumprod", "sort", "argmax",
            "argsort", "flip", "transpose", "sum", "mean", "var", "std", "prod", "max", "min", "any", "all", "isnan",
            "isfinite", "nan_to_num", "ravel", "diff", "triu", "tril", "median", "zeros_like", "ones_like")},
        "gelu": nn.gelu,
        "exact gelu": partial(nn.gelu, approximate=False),
        "one hot": lambda x: nn.one_hot(jnp.argmax(x, -1), 8),
        "top k": lambda x: lax.top_k(x, 2)[0],
        "norm": lambda x: _norm(x, jnp.ones(8)),
        "attention": lambda x: _attention(x, 8**-0.5, False),
        "causal attention": lambda x: _attention(x, 0.3, True),
        "attention by 0": lambda x: _attention(x, 0.0, False),
        "library attention": lambda x: nn.dot_product_attention(*[x[None, :, None]] * 3),
        "rotary": _rotated,
        "scan": lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(8), x)[1],
        "reversed scan": lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(8), x, reverse=True)[1],
        "scan of nothing": lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0],
        "loop": lambda x: lax.fori_loop(0, 3, lambda _, y: y * 2, x),
        "while": lambda x: lax.while_loop(lambda y: y.sum() < 100, lambda y: y * y + 1, x),
        "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
        "known cond": lambda x: lax.cond(True, jnp.sin, jnp.cos, x),
        "switch": lambda x: lax.switch(1, (jnp.sin, jnp.cos), x),
        "vmap": jax.vmap(lambda r: r @ r),
        "grad": jax.grad(lambda x: (jnp.tanh(x) ** 2).sum()),
        "jit": jax.jit(lambda x: x + 1),
        "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * 2),
        "custom": lambda x: nn.relu(nn.relu(x) - 1),
        "power": lambda x: jnp.abs(x) ** 1.5,
        "power of 0": lambda x: x**0,
        "power of -1": lambda x: x**-1,
        "by 0": lambda x: jnp.clip(x / 0.0, -1, 1),
        "nan": lambda x: jnp.where(x > 9, jnp.nan, x),
        "infinite": lambda x: jnp.minimum(x, jnp.inf),
        "remainder": lambda x: x % 0.3,
        "index": lambda x: x[1],
        "indices": lambda x: x[jnp.asarray([2, 0])],
        "last indices": lambda x: x[:, jnp.asarray([2, 0])],
        "negative index": lambda x: x[-1, -2],
        "strided": lambda x: x[::2, 1::2],
        "backwards": lambda x: x[::-1],
        "nothing": lambda x: jnp.concatenate((x[:, :0], x + 1), -1),
        "only nothing": lambda x: x[:, :0],
        "set": lambda x: x.at[1].set(0.0),
        "add at": lambda x: x.at[1].add(1.0),
        "dynamic slice": lambda x: lax.dynamic_slice(x, (1, 2), (2, 3)),
        "pad": lambda x: jnp.pad(x, 1),
        "roll": lambda x: jnp.roll(x, 1),
        "repeat": lambda x: jnp.repeat(x, 2, 0),
        "tile": lambda x: jnp.tile(x, 2),
        "stack": lambda x: jnp.stack((x, x + 1)),
        "split": lambda x: sum(jnp.split(x, 2, -1)),
        "of size 1": lambda x: x[:1] * x[:, :1],
        "swap": lambda x: jnp.swapaxes(x.reshape(2, 2, 8), 0, 1),
        "complex": lambda x: jnp.abs(x * 1j),
        "fft": lambda x: jnp.fft.rfft(x).real,
        "bits": lambda x: (x > 0) ^ (x > 1),
        "half": lambda x: (x.astype(jnp.bfloat16) * 2).astype(x.dtype),
        "integers": lambda x: (x.astype(int) // 2) % 3,
        "stop": lambda x: lax.stop_gradient(x) * x,
        "conv": lambda x: jnp.convolve(x[0], x[1, :3]),
        "images": lambda x: lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME"),
        "pool": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
        "length": jnp.linalg.norm,
        "solve": lambda x: jnp.linalg.inv(x[:, :4] @ x[:, :4].T + jnp.eye(4)),
        "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
        "itself": lambda x: (x, x + 1),
        "of no input": lambda x: jnp.arange(3.0),
        "tree": lambda x: {"a": x + 1, "b": [x.sum()]},
        "associative": lambda x: lax.associative_scan(jnp.add, x),
        "map": lambda x: lax.map(jnp.sin, x),
        "searched": lambda x: jnp.searchsorted(jnp.sort(x[0]), x[1]),
        "reduced precision": lambda x: lax.reduce_precision(x, 8, 7),
        "argument of 0": lambda x: lax.broadcast(x.sum(), (2, 3)) + lax.reshape(1.5 * x.sum(), (1, 1)),
        "literal": lambda x: x + jnp.reshape(jnp.asarray(2.0), (1, 1)),
    }  # fmt: skip
    found: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {n: (f, (x,)) for n, f in of_one.items()}
    return found | {
        "linear": (lambda x, w, b: x @ w + b, (x, w, b)),
        "mlp": (lambda x, w, b: nn.gelu(x @ w + b) @ w.T, (x, w, b)),
        "embedding": (lambda t, i: t[i], (w, np.asarray([[1, 2], [3, 0]]))),
        "negative ids": (lambda t, i: t[i], (w, np.asarray([-1, 2]))),
        "taken": (lambda t, i: jnp.take(t, i, axis=1), (w, np.asarray([1, 2]))),
        "ragged": (lambda a, b: jnp.einsum("ij,jk->k", a, b), (x, w)),
    }


def node(kind: str, *given: str, made: int = 1, **attributes: Any) -> Any:
    """Return a node whose results are y, y1, ..."""
    return helper.make_node(kind, given, [f"y{k or ''}" for k in range(made)], **attributes)


def graphs() -> dict[str, tuple[Any, Arrays]]:
    """Return models of ONNX by name, with arrays in f32."""
    x, y = numbers(4, 6).astype("f4"), numbers(4, 6, seed=1).astype("f4")
    image = numbers(1, 3, 6, 6).astype("f4")
    one = (
        "Relu",
        "Sigmoid",
        "Tanh",
        "Erf",
        "Exp",
        "Neg",
        "Abs",
        "Sin",
        "Cos",
        "Reciprocal",
        "Softplus",
        "Softsign",
        "Elu",
        "Selu",
        "Celu",
        "LeakyRelu",
        "HardSigmoid",
        "HardSwish",
        "Mish",
        "Gelu",
        "ThresholdedRelu",
        "Sign",
        "Floor",
        "Ceil",
        "Round",
        "IsNaN",
        "IsInf",
        "Softmax",
        "LogSoftmax",
        "Hardmax",
        "Identity",
        "Dropout",
        "Transpose",
        "Flatten",
        "Shape",
        "Size",
        "NonZero",
        "Det",
        "ReduceMean",
        "ReduceSum",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSumExp",
        "ReduceSumSquare",
        "ArgMax",
        "ArgMin",
        "MeanVarianceNormalization",
        "LpNormalization",
        "Trilu",
        "EyeLike",
        "GlobalAveragePool",
        "Squeeze",
    )
    two = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Mean", "Sum", "Mod", "Equal", "Less", "Greater", "PRelu",
           "BitShift")  # fmt: skip
    found: dict[str, tuple[Any, Arrays]] = {n: ([node(n, "x")], {"x": x}) for n in one}
    found |= {n: ([node(n, "x", "z", **({"fmod": 1} if n == "Mod" else {}))], {"x": x, "z": y}) for n in two}
    held = {"x": x}
    more: dict[str, tuple[list[Any], Arrays, Arrays]] = {
        "MatMul": ([node("MatMul", "x", "w")], held, {"w": y.T.copy()}),
        "Gemm": ([node("Gemm", "x", "w", "b", transB=1)], held, {"w": y, "b": y[0, :4]}),
        "Gemm with factors": ([node("Gemm", "x", "w", "b", alpha=2.0, transB=1)], held, {"w": y, "b": y[0, :4]}),
        "LayerNormalization": ([node("LayerNormalization", "x", "w", "b")], held, {"w": y[0], "b": y[1]}),
        "BatchNormalization": ([node("BatchNormalization", "x", "w", "b", "m", "v")], held,
                               {"w": y[0], "b": y[1], "m": y[2], "v": np.abs(y[3]) + 1}),
        "InstanceNormalization": ([node("InstanceNormalization", "x", "w", "b")], {"x": image},
                                  {"w": y[0, :3], "b": y[1, :3]}),
        "Conv": ([node("Conv", "x", "w")], {"x": image}, {"w": numbers(2, 3, 3, 3).astype("f4")}),
        "MaxPool": ([node("MaxPool", "x", kernel_shape=[2, 2])], {"x": image}, {}),
        "AveragePool": ([node("AveragePool", "x", kernel_shape=[2, 2])], {"x": image}, {}),
        "Resize": ([node("Resize", "x", "", "s")], {"x": image}, {"s": np.asarray([1, 1, 2, 2], "f4")}),
        "Reshape": ([node("Reshape", "x", "s")], held, {"s": np.asarray([3, -1])}),
        "Slice": ([node("Slice", "x", "a", "b", "d")], held,
                  {k: np.asarray([v]) for k, v in zip("abd", (1, 3, 1), strict=True)}),
        "Slice backwards": ([node("Slice", "x", "a", "b", "d", "s")], held,
                            {k: np.asarray([v]) for k, v in zip("abds", (-1, -99, 1, -1), strict=True)}),
        "Slice of nothing": ([helper.make_node("Slice", ["x", "a", "b", "d"], ["e"]), node("Concat", "e", "x", axis=1)],
                             held, {k: np.asarray([v]) for k, v in zip("abd", (3, 3, 1), strict=True)}),
        "only nothing": ([node("Slice", "x", "a", "b", "d")], held,
                         {k: np.asarray([v]) for k, v in zip("abd", (3, 3, 1), strict=True)}),
        "Gather": ([node("Gather", "x", "i")], held, {"i": np.asarray([2, 0])}),
        "Gather of columns": ([node("Gather", "x", "i", axis=1)], held, {"i": np.asarray([2, 0])}),
        "Gather of one": ([node("Gather", "x", "i", axis=1)], held, {"i": np.asarray(-1)}),
        "GatherElements": ([node("GatherElements", "x", "i")], held, {"i": np.zeros((1, 6), int)}),
        "GatherND": ([node("GatherND", "x", "i")], held, {"i": np.asarray([[0, 1]])}),
        "ScatterElements": ([node("ScatterElements", "x", "i", "u")], held,
                            {"i": np.zeros((1, 6), int), "u": y[:1]}),
        "Concat": ([node("Concat", "x", "w", axis=0)], held, {"w": y}),
        "Split": ([node("Split", "x", "s", made=2, axis=1)], held, {"s": np.asarray([2, 4])}),
        "Expand": ([node("Expand", "x", "s")], held, {"s": np.asarray([2, 1, 1])}),
        "Tile": ([node("Tile", "x", "s")], held, {"s": np.asarray([2, 1])}),
        "Unsqueeze": ([node("Unsqueeze", "x", "s")], held, {"s": np.asarray([0, -1])}),
        "Pad": ([node("Pad", "x", "s")], held, {"s": np.asarray([1, 0, 0, 2])}),
        "Clip": ([node("Clip", "x", "a", "b")], held, {"a": np.float32(-0.5), "b": np.float32(0.5)}),
        "Where": ([helper.make_node("Greater", ["x", "w"], ["c"]), node("Where", "c", "x", "w")], held, {"w": y}),
        "Where nan": ([helper.make_node("Greater", ["x", "w"], ["c"]), node("Where", "c", "n", "x")], held,
                      {"w": y * 0 + 9, "n": np.float32(np.nan)}),
        "And": ([helper.make_node("Greater", ["x", "w"], ["c"]), helper.make_node("Less", ["x", "w"], ["d"]),
                 node("And", "c", "d")], held, {"w": y}),
        "Xor": ([helper.make_node("Greater", ["x", "w"], ["c"]), helper.make_node("Less", ["x", "w"], ["d"]),
                 node("Xor", "c", "d")], held, {"w": y}),
        "Cast": ([node("Cast", "x", to=onnx.TensorProto.DOUBLE)], held, {}),
        "Cast of integers": ([node("Cast", "x", to=onnx.TensorProto.INT32)], held, {}),
        "Einsum": ([node("Einsum", "x", "w", equation="ij,kj->ik")], held, {"w": y}),
        "Einsum of one": ([node("Einsum", "x", equation="ij->ji")], held, {}),
        "TopK": ([node("TopK", "x", "k", made=2)], held, {"k": np.asarray([2])}),
        "CumSum": ([node("CumSum", "x", "k")], held, {"k": np.asarray(1)}),
        "OneHot": ([node("OneHot", "i", "n", "v")], {"i": np.asarray([1, 2])},
                   {"n": np.asarray(4), "v": np.asarray([0, 1], "f4")}),
        "Range": ([helper.make_node("Range", ["a", "b", "s"], ["r"]), node("Add", "x", "r")], held,
                  {"a": np.float32(0), "b": np.float32(6), "s": np.float32(1)}),
        "ConstantOfShape": ([helper.make_node("ConstantOfShape", ["s"], ["o"]), node("Add", "x", "o")], held,
                            {"s": np.asarray([4, 6])}),
        "LSTM": ([node("LSTM", "x", "w", "r", hidden_size=2)], {"x": numbers(3, 1, 2).astype("f4")},
                 {"w": numbers(1, 8, 2).astype("f4"), "r": numbers(1, 8, 2).astype("f4")}),
        "Loop": ([node("Loop", "n", "", "x", body=_body())], held, {"n": np.asarray(3)}),
        "If": ([node("If", "c", then_branch=_branch(1.0), else_branch=_branch(2.0))], {"c": np.asarray(True)}, {}),
        "DepthToSpace": ([node("DepthToSpace", "x", blocksize=2)], {"x": numbers(1, 4, 2, 2).astype("f4")}, {}),
        "QuantizeLinear": ([node("QuantizeLinear", "x", "s")], held, {"s": np.float32(0.1)}),
        "by 0": ([node("Div", "x", "n")], held, {"n": np.float32(0)}),
        "power of 0": ([node("Pow", "x", "n")], held, {"n": np.float32(0)}),
        "power of 2": ([node("Pow", "x", "n")], held, {"n": np.float32(2)}),
        "infinite": ([node("Min", "x", "n")], held, {"n": np.float32(np.inf)}),
        "itself": ([helper.make_node("Identity", ["x"], ["y"])], held, {}),
        "known": ([node("Add", "a", "a")], held, {"a": np.float32(2)}),
    }  # fmt: skip
    return {n: (_model(nodes, given, {}), given) for n, (nodes, given) in found.items()} | {
        n: (_model(nodes, given, kept), given) for n, (nodes, given, kept) in more.items()
    }


def _body() -> Any:
    number, flag = (helper.make_tensor_value_info(n, t, []) for n, t in (("k", 7), ("c", 9)))
    inside = helper.make_tensor_value_info("v", 1, [4, 6])
    out = [helper.make_tensor_value_info("c", 9, []), helper.make_tensor_value_info("u", 1, [4, 6])]
    return helper.make_graph([helper.make_node("Add", ["v", "v"], ["u"])], "body", [number, flag, inside], out)


def _branch(value: float) -> Any:
    tensor = numpy_helper.from_array(np.asarray(value, "f4"))
    return helper.make_graph([helper.make_node("Constant", [], ["o"], value=tensor)], "branch", [],
                             [helper.make_tensor_value_info("o", 1, [])])  # fmt: skip


def _model(nodes: list[Any], given: Arrays, kept: Arrays) -> Any:
    kind = helper.np_dtype_to_tensor_dtype
    inputs = [helper.make_tensor_value_info(n, kind(a.dtype), a.shape) for n, a in given.items()]
    names = list(nodes[-1].output)
    outputs = [helper.make_tensor_value_info(n, 1, None) for n in names]
    held = [numpy_helper.from_array(np.asarray(a), n) for n, a in kept.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
