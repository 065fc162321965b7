"""The price of a kernel: the roofline at what kernels of its class reach, of one and of arrays, said of the device."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
from shardplan.core.ops import Einsum
from shardplan.core.pattern import Work
from shardplan.errors import TopologyError
from shardplan.hardware.level import DeviceSpec, KernelShares
from shardplan.hardware.prices.cost import price
from shardplan.hardware.prices.fabric import Fabric
from shardplan.hardware.prices.kernels import kernel_seconds, stream_seconds

SHARES = KernelShares(product=0.7, attention=0.4, stream=0.8, half=60.0)
DEVICE = DeviceSpec((("bf16", 312e12), ("f32", 19.5e12)), memory_bandwidth=2e12, kernels=SHARES)
COUNTS = st.floats(1e3, 1e15)
SIDES = st.floats(1.0, 1e5)


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(("product", "scores", "loss", "streamed")),
    st.sampled_from(("bf16", "f16", "f32", "i8")),
    COUNTS,
    COUNTS,
    st.lists(SIDES, min_size=3, max_size=3),
)
def test_it_is_the_longer_of_operations_and_bytes(
    kind: str, dtype: str, flops: float, nbytes: float, sides: list[float]
) -> None:
    rate = {"bf16": 312e12, "f16": 312e12, "f32": 19.5e12, "i8": math.inf}[dtype]
    busy = flops / rate
    if kind == "product":
        m, n, k = sides
        busy = flops / (0.7 * rate) * (1 + 60 / m + 60 / n + 60 / k)
    if kind == "scores":
        busy = flops / (0.4 * rate)
    wanted = max(busy, nbytes / 1.6e12)
    work = Work(flops, dtype, nbytes, kind, tuple(sides) if kind == "product" else ())
    assert kernel_seconds(work, DEVICE) == pytest.approx(wanted, rel=1e-12)
    # Whoever asks a pattern's price asks this, on any topology; and at many sizes at once.
    topology = replace(sp.Topology.load("nominal", devices=1), device=DEVICE)
    assert price(work, Fabric(topology)).seconds == pytest.approx(wanted, rel=1e-12)
    many = Work(np.array([flops, 2 * flops]), dtype, np.array([nbytes, nbytes]), kind, work.sides)
    assert np.asarray(kernel_seconds(many, DEVICE)).tolist() == [
        kernel_seconds(work, DEVICE),
        kernel_seconds(replace(work, flops=2 * flops), DEVICE),
    ]
    assert stream_seconds(nbytes, DEVICE) == pytest.approx(nbytes / 1.6e12, rel=1e-12)


def test_a_product_says_its_sides_on_its_worst_device() -> None:
    """Rows, columns and what is summed over, by the letters of 100 drawn products on drawn layouts."""
    rng, mesh, seen = random.Random(3), sp.Mesh(x=2, y=3), 0
    for _ in range(100):
        letters = "bmnk"
        kept = {f: [g for g in ("b", *pair) if rng.random() < 0.9 or g in pair] for f, pair in
                zip("lrc", (("m", "k"), ("k", "n"), ("m", "n")), strict=True)}  # fmt: skip
        if len({"b" in dims for dims in kept.values()}) > 1:
            continue
        for dims in kept.values():
            rng.shuffle(dims)
        spec = f"{''.join(kept['l'])},{''.join(kept['r'])}->{''.join(kept['c'])}"
        size = {f: rng.choice((1, 5, 6, 12, 48)) for f in letters}
        cut = dict(zip(("x", "y"), rng.sample(letters, 2), strict=True))
        types = [
            sp.TensorType("f32", [size[f] for f in kept[side]],
                          [tuple(a for a in mesh.axes if cut[a] == f) for f in kept[side]], mesh)
            for side in "lr"
        ]  # fmt: skip
        local = {f: math.ceil(n / math.prod(mesh.shape[a] for a in mesh.axes if cut[a] == f)) for f, n in size.items()}
        work = Einsum(spec).pattern(*types)
        assert isinstance(work, Work) and work.kind == "product"
        assert work.sides == tuple(float(local[f]) for f in "mnk"), (spec, types)
        seen += 1
    assert seen > 60
    assert Einsum("ij->ji").pattern(sp.TensorType.parse("f32[4, 8]", "x=1")).sides == ()  # pyright: ignore


def test_what_kernels_reach_stands_in_the_file_of_a_topology() -> None:
    topology = replace(sp.Topology.load("dgx-a100", nodes=2), device=DEVICE)
    text = str(topology)
    assert "kernels = { product = 0.7, attention = 0.4, stream = 0.8, half = 60.0 }" in text
    assert sp.Topology.parse(text) == topology
    assert "kernels" not in str(sp.Topology.load("dgx-a100"))
    for wrong, says in (
        ("product = 0", "device: kernels: product is 0.0, it must be above 0"),
        ("half = -1", "device: kernels: half is -1.0; legal is a finite number of 0 or more"),
        ("products = 1", "device: kernels: unknown key 'products'; did you mean 'product'; legal: product, attention"),
        ("stream = true", "device: kernels: stream must be a number, got True"),
    ):
        with pytest.raises(TopologyError, match=says.replace("(", r"\(")):
            sp.Topology.parse(text.replace("product = 0.7, attention = 0.4, stream = 0.8, half = 60.0", wrong))
    with pytest.raises(TopologyError, match="device: kernels is 3; legal is KernelShares"):
        DeviceSpec(kernels=3)  # pyright: ignore[reportArgumentType]
