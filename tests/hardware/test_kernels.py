"""The price of a kernel: the roofline at what kernels of its class reach, of one and of arrays, said of the device."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan as sp
from shardplan.core.ops import Attention, Backward, Einsum
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


def attention_seconds(heads: int, queries: int, width: int, value: int, products: int, seen: float) -> float:
    """Seconds of attention, its blocks dealt out one by one: the slowest processor, and what others wait at the end."""
    block = 128
    scores = 312e12 / 108 / (16 * 1.6e9)  # operations that one exponential takes
    share = 0.4 * (512 + scores) / 512 * (4 * max(width, value)) / (4 * max(width, value) + scores)
    share *= 0.85 if products > 2 else 1.0
    rate = 312e12 * share / 108
    per_pair = 2.0 * products * max(width, value)
    rows = [min(block, queries - at) for at in range(0, queries, block)]
    pairs = [n * queries * 2 * seen * (k + 0.5) / len(rows) for k, n in enumerate(rows)]
    diagonal = [n * block / 2 * (seen < 1) for n in rows]
    longest = block * queries * per_pair / rate
    whole = heads * sum(a + b for a, b in zip(pairs, diagonal, strict=True)) * per_pair / rate / 108
    return max(longest, whole + 0.27 * longest)


@pytest.mark.parametrize("heads", [1, 4, 8, 32, 128])
@pytest.mark.parametrize("width", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("products", [2, 5])
def test_attention_is_dealt_out_in_blocks(heads: int, width: tuple[int, int], products: int) -> None:
    """Few heads leave processors idle until the longest block ends; narrow heads and padded values take longer."""
    device = replace(DEVICE, processors=108)
    for queries, seen in ((1024, 0.5), (4096, 0.5), (4096, 1.0)):
        flops = products * 1.0 * heads * queries**2 * seen * sum(width)
        sides = (float(heads), float(queries), float(queries), *map(float, width), seen, float(products))
        found = kernel_seconds(Work(flops, "bf16", 1.0, "scores", sides), device)
        assert found == pytest.approx(attention_seconds(heads, queries, *width, products, seen), rel=1e-9)
    # One query of a sequence is no block: kernels share its keys out.
    one = Work(4e6, "bf16", 1.0, "scores", (8.0, 1.0, 8192.0, 128.0, 128.0, 1.0, 2.0))
    assert kernel_seconds(one, device) == pytest.approx(4e6 / (0.4 * 312e12))


def test_ops_say_what_attention_is() -> None:
    """Forward and back, of a device's heads."""
    q, k, v = (sp.TensorType.parse(f"bf16[2, 64, 8@x, 2, {d}]".replace(", 2, ", s), "x=4")
               for d, s in ((24, ", 2, "), (24, ", "), (16, ", ")))  # fmt: skip
    work = Attention().pattern(q, k, v)
    assert isinstance(work, Work) and work.sides == (8.0, 64.0, 64.0, 24.0, 16.0, 0.5, 2.0)
    back = Backward(Attention(), (0, 1, 2)).pattern(q, k, v, *Attention().infer(q, k, v))
    assert isinstance(back, Work) and back.sides == (8.0, 64.0, 64.0, 24.0, 16.0, 0.5, 5.0)


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
