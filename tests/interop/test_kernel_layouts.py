"""What kernels keep in place of loaded weights: row by row beside slow loops, filled in place after every refit."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import shardplan as sp
from shardplan.core.dtypes import numpy_dtype
from shardplan.errors import LayoutError
from shardplan.interop.torch.refit.kernel_layouts import BlockFp8, FinishedLayouts, FlashInferExperts, TransposedMxfp8
from shardplan.movement.weights.weights import Weights

LATENT: dict[str, Any] = {
    "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4, "moe_intermediate_size": 16,
    "intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2,
    "vocab_size": 128, "tie_word_embeddings": False,
}  # fmt: skip

# Where rows of a block go, as the kernels' library lists them.
MAPS = {
    16: [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15],
    32: [x + 8 * k for x in range(8) for k in range(4)],
}


def slow_rows(count: int, block: int, gated: bool) -> list[int]:
    """One step after the other: swap the halves, lay them in turn, then put each row where the list says."""
    rows = list(range(count))
    if gated:
        half = count // 2
        rows = rows[half:] + rows[:half]
        rows = [rows[k // 2 + (k % 2) * half] for k in range(count)]
    out = [-1] * count
    for old in range(count):
        out[old // block * block + MAPS[block][old % block]] = rows[old]
    return out


@pytest.mark.parametrize(("tile", "block"), [(128, 32), (256, 32), (64, 16)])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_of_experts_are_those_of_the_kernels_library(tile: int, block: int, gated: bool) -> None:
    x = torch.randn(3, 4 * block, 5, generator=torch.Generator().manual_seed(0))
    found = FlashInferExperts(tile, gated).of("w", x)[""]
    for expert in range(3):
        assert torch.equal(found[expert], torch.stack([x[expert, r] for r in slow_rows(4 * block, block, gated)]))


def slow_mxfp8(row: np.ndarray) -> tuple[list[float], list[int]]:
    """Elements and scales of one row, block by block, in exact arithmetic."""
    elements: list[float] = []
    scales: list[int] = []
    for k in range(0, len(row), 32):
        block = [float(v) for v in row[k : k + 32]]
        most = max(map(abs, block))
        power = max(-127, math.floor(math.log2(most)) - 8) if most else -127
        scales.append(power + 127)
        for v in block:
            clipped = max(-448.0, min(448.0, v / 2.0**power))
            elements.append(float(np.float32(clipped).astype(ml_dtypes.float8_e4m3fn)))
    return elements, scales


def test_mxfp8_has_the_elements_and_scales_of_its_definition() -> None:
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((6, 96)) * 2.0 ** rng.integers(-20, 20, (6, 1))).astype(np.float32)
    x[0, :32] = 0.0
    x[1, 0] = 2.0**5 * 1.99  # its own largest is beyond 448 after scaling
    plain = TransposedMxfp8(transposed=False).of("w", torch.from_numpy(x))
    across = TransposedMxfp8().of("w", torch.from_numpy(x))
    for n in range(6):
        elements, scales = slow_mxfp8(x[n])
        assert plain[""][n].float().tolist() == elements and plain["_scale"][n].tolist() == scales
    assert torch.equal(across[""].float(), plain[""].float().t()) and across[""].is_contiguous()
    assert torch.equal(across["_scale"], plain["_scale"].t())
    back = plain[""].float().view(6, 3, 32) * torch.exp2(plain["_scale"].float() - 127).unsqueeze(-1)
    assert float((back.reshape(6, 96) - torch.from_numpy(x)).abs().max() / np.abs(x).max()) <= 2**-3  # 448 of 512


def test_square_blocks_each_have_their_largest_at_448() -> None:
    x = np.random.default_rng(2).standard_normal((2, 10, 13)).astype(np.float32)
    x[1, :4, 4:8] = 0
    x[0, :4, 4:8] = [[0, 0, 0, 1e-44]] * 4  # whose scale would be 0
    found = BlockFp8(4).of("w", torch.from_numpy(x))
    assert found[""].shape == x.shape and found["_scale_inv"].shape == (2, 3, 4)
    for e, a, b in np.ndindex(2, 3, 4):
        block = x[e, 4 * a : 4 * a + 4, 4 * b : 4 * b + 4]
        scale = np.abs(block).max() / np.float32(448) or np.float32(1)
        assert found["_scale_inv"][e, a, b].item() == scale
        want = (block / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        assert np.array_equal(found[""][e, 4 * a : 4 * a + 4, 4 * b : 4 * b + 4].float().numpy(), want)


def test_a_trainer_quantises_and_sends_what_a_table_with_scales_stores() -> None:
    config = LATENT | {"weight_block_size": 4}
    trainer = Weights.load("hf-deepseek-v3-fp8", config)
    server = Weights.load("vllm-deepseek-v3-fp8", config, tensor=2, devices=[1, 2])
    rng = np.random.default_rng(3)
    sent: dict[str, np.ndarray] = {}
    for name, shape, dtype in trainer.parameters(0):
        if name.endswith("_scale_inv"):
            continue
        plain = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        if dtype != "f8e4m3":
            sent[name] = plain.numpy().astype(numpy_dtype(dtype))
            continue
        for added, made in BlockFp8(4).of(name, plain).items():
            raw = made.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) if not added else made.numpy()
            sent[name + added] = raw
    trainer.check(sent, 0)
    got = sp.refit(trainer, server).apply({0: sent})
    at = "model.layers.1.mlp.shared_experts.down_proj.weight"
    whole, scales = sent[at], sent[at + "_scale_inv"]
    for rank in (0, 1):
        own = got[1 + rank]
        half = whole.shape[1] // 2
        assert own[at].tobytes() == np.ascontiguousarray(whole[:, rank * half : (rank + 1) * half]).tobytes()
        blocks = scales.shape[1] // 2
        assert np.array_equal(own[at + "_scale_inv"], scales[:, rank * blocks : (rank + 1) * blocks])


def test_what_was_made_is_filled_in_place() -> None:
    model = torch.nn.Module()
    model.w13 = torch.nn.Parameter(torch.randn(2, 64, 4))
    model.proj = torch.nn.Parameter(torch.randn(8, 64))
    model.norm = torch.nn.Parameter(torch.randn(8))
    finish = FinishedLayouts({"w13": FlashInferExperts(), "p*": TransposedMxfp8()})
    finish(model)
    assert finish.tensors.keys() == {"w13", "proj", "proj_scale"}
    addresses = {n: t.data_ptr() for n, t in finish.tensors.items()}
    loaded = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert all(torch.equal(loaded[n], p) for n, p in model.named_parameters())
    model.w13.data.add_(1)
    model.proj.data.mul_(4)
    before = {n: t.clone() for n, t in finish.tensors.items()}
    finish(model)
    assert {n: t.data_ptr() for n, t in finish.tensors.items()} == addresses
    assert torch.equal(finish.tensors["w13"], FlashInferExperts().of("w", model.w13.detach())[""])
    assert torch.equal(finish.tensors["proj_scale"], before["proj_scale"] + 2)


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        ({"w": FlashInferExperts(), "x*": TransposedMxfp8()}, r"which no parameter is .* legal are \['odd', 'flat'\]"),
        ({"*": BlockFp8(), "w": FlashInferExperts()}, r"finish= has 'w', which no parameter is that no pattern before"),
        ({"odd": FlashInferExperts()}, "24 rows in blocks of 32; legal is a multiple of 32"),
        ({"flat": FlashInferExperts()}, "legal is a stack of experts, three dims"),
        ({"odd": TransposedMxfp8()}, "legal is a last dim in whole blocks of 32"),
    ],
)
def test_what_no_kernel_takes_is_refused(layouts: dict[str, Any], said: str) -> None:
    named = {"w": torch.zeros(1, 32, 32), "odd": torch.zeros(1, 24, 8), "flat": torch.zeros(32, 32)}
    with pytest.raises(LayoutError, match=said):
        FinishedLayouts(layouts)(named)


def test_a_parameter_keeps_the_shape_that_was_made() -> None:
    """One of a single row would fill all rows."""
    finish = FinishedLayouts({"w": BlockFp8(4)})
    finish({"w": torch.ones(2, 4, 4)})
    with pytest.raises(LayoutError, match=r"^w of shape \[1, 4, 4\]; legal is that of the first call, \[2, 4, 4\]$"):
        finish({"w": torch.ones(1, 4, 4)})


@pytest.mark.parametrize("make", [BlockFp8, FlashInferExperts])
@pytest.mark.parametrize("size", [0, -128, 1.5])
def test_sizes_that_are_none(make: Any, size: Any) -> None:
    with pytest.raises(LayoutError, match=r"is .*; legal is a whole number of at least 1"):
        make(size)
