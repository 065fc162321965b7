"""What a tensor axis may cut of an imported model: dims inside a block, whatever made them; and scans, rows, inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional

import shardplan as sp
from shardplan.core.nested import as_nested
from shardplan.core.ops import Einsum
from shardplan.core.program import Program
from shardplan.core.step import Step
from shardplan.strategy.repeats import recover_repeats

FOUR = sp.Strategy(tensor=2, data=2, global_batch=4, microbatch=2)


class Of(nn.Module):
    """A function of a tensor and of modules."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def held(job: sp.Job) -> dict[str, str]:
    return {name: str(t) for name, t in job.state.items() if "tensor" in str(t)}


def ran(module: nn.Module, x: Tensor, names: tuple[str | None, ...]) -> sp.Job:
    """Its job on four devices, which computes what torch does."""
    module = module.double().eval()
    model = sp.load(module, (x,), {"x": names})
    job = sp.partition(model, FOUR)
    weights = {n: t.detach().numpy() for n, t in (*module.named_parameters(), *module.named_buffers())}
    files = {file for p in model.parameters.values() for _, file in p.names()}
    given = model.pack({n: w for n, w in weights.items() if n in files}) | dict(model.constants) | {"x": x.numpy()}
    found = sp.run(job, given)["output"]
    assert np.abs(found - module(x).detach().numpy()).max() <= 1e-12
    return job


def test_what_one_product_makes_and_the_next_takes_is_cut_once_in_each_weight() -> None:
    """A chain of four: the first inner dim and the third; the second would cut their weights twice."""
    layers = [nn.Linear(6, 8), nn.Linear(8, 10), nn.Linear(10, 12), nn.Linear(12, 6)]
    job = ran(Of(lambda x, *f: f[3](f[2](f[1](f[0](x).relu())).relu()), *layers), numbers(4, 6), ("batch", None))
    assert held(job) == {"parts.0.weight": "f64[8@tensor, 6]", "parts.0.bias": "f64[8@tensor]",
                         "parts.1.weight": "f64[10, 8@tensor]", "parts.2.weight": "f64[12@tensor, 10]",
                         "parts.2.bias": "f64[12@tensor]", "parts.3.weight": "f64[6, 12@tensor]"}  # fmt: skip


def test_channels_between_convolutions_are_cut() -> None:
    parts = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 3, 3, padding=1))
    job = ran(Of(lambda x, a, n, b: x + b(n(a(x)).relu()), *parts), numbers(4, 3, 6, 6), ("batch", None, None, None))
    assert held(job)["parts.0.weight"] == "f64[8@tensor, 3, 3, 3]"
    assert held(job)["parts.2.weight"] == "f64[3, 8@tensor, 3, 3]"


def test_one_product_alone_deals_out_what_it_makes() -> None:
    job = ran(Of(lambda x, f: f(x), nn.Linear(6, 8)), numbers(4, 6), ("batch", None))
    assert held(job)["parts.0.weight"] == "f64[8@tensor, 6]"


def test_halves_of_a_weight_that_meet_another_are_its_factors() -> None:
    """Gates beside values in one weight: neither is cut through the middle."""

    def gated(x: Tensor, up: nn.Module, down: nn.Module) -> Tensor:
        gate, value = up(x).chunk(2, -1)
        return down(functional.silu(gate) * value)

    job = ran(Of(gated, nn.Linear(6, 16, bias=False), nn.Linear(8, 6)), numbers(4, 6), ("batch", None))
    assert held(job) == {"parts.0.weight": "f64[2, 8@tensor, 6]", "parts.1.weight": "f64[6, 8@tensor]"}


def test_a_head_of_its_own_is_of_words() -> None:
    module = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 10)).double()
    model = sp.load(module, (torch.zeros(4, 3, dtype=torch.long),), {"input": ("batch", "sequence")})
    assert model.dims["0.weight"][0] == model.dims["3.weight"][0] == "vocab"
    assert model.dims["1.weight"] == ("ffn", "hidden")


class Decays(nn.Module):
    """What is carried decays by a constant, in torch's own scan; of each state some elements leave."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)
        self.register_buffer("by", torch.tensor([0.5, -1.0, 2.0, 3.0]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        def step(h: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
            h = h * self.by + new
            return h, h[:, torch.tensor([2, 0, 3])]

        return scan(step, torch.zeros_like(x[:, 0]), self.f(x), dim=1)[1]


def test_a_scan_of_torch_is_a_repeat_with_constants_inside() -> None:
    job = ran(Decays(), numbers(4, 5, 4), ("batch", "sequence", None))
    assert [op.times for s in job.programs[0, "F"].steps if (op := as_nested(s.op))] == [5]


def test_inputs_of_a_call_are_no_rows_of_a_stack() -> None:
    x, w = (sp.TensorType.parse(t, "x=1") for t in ("f32[2, 3]", "f32[3, 3]"))
    steps = [Step(Einsum("bi,io->bo"), (str(k), f"w{k}"), (str(k + 1),)) for k in range(4)]
    flat = Program({"0": x} | {f"w{k}": w for k in range(4)}, steps, ("4",))
    assert recover_repeats(flat).stacks["w0"] == ("w0", "w1", "w2", "w3")
    found = recover_repeats(flat, alone={"w3"})
    assert found.stacks == {"w0": ("w0", "w1", "w2")} and "w3" in dict(found.program.inputs)


JAX: dict[str, Callable[[Any], Any]] = {
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "cumsum backwards": lambda x: jax.lax.cumsum(x, 1, reverse=True),
    "sort": lambda x: jnp.sort(x, -1),
    "sort of two": lambda x: jax.lax.sort((x, x * x), num_keys=1)[1],
    "argsort": lambda x: jnp.argsort(x, -1).astype(x.dtype),
    "top_k": lambda x: jax.lax.top_k(x, 2)[0],
    "argmin": lambda x: jnp.argmin(x, -1).astype(x.dtype),
    "flip": lambda x: jnp.flip(x, -1),
    "pad inside": lambda x: jax.lax.pad(x, jnp.zeros((), x.dtype), ((1, 0, 0), (0, 2, 1))),
    "add at rows": lambda x: x.at[np.array([0, 2, 0])].add(x[:3] * 2),
    "add at one row": lambda x: x.at[1].add(3.0),
    "known branch": lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x),
    "convolution": lambda x: jnp.convolve(x[0], x[1, :3], "same"),
    "convolution of images": lambda x: jax.lax.conv_general_dilated(
        x.reshape(1, 4, 4, 2), x.reshape(2, 2, 2, 4), (1, 1), ((1, 1), (0, 1)), (2, 1), (1, 2),
        ("NHWC", "HWIO", "NCHW")),
}  # fmt: skip


@pytest.mark.parametrize("name", JAX)
def test_what_jax_orders_sums_and_shifts(name: str) -> None:
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("f4")
    model = sp.load(jax.make_jaxpr(JAX[name])(x), {"x": ("batch", None)})
    found = sp.run(sp.partition(model, sp.Strategy(global_batch=4, microbatch=4)), {"x": x} | dict(model.constants))
    assert np.abs(found["output"] - np.asarray(JAX[name](jnp.asarray(x)))).max() <= 1e-5
