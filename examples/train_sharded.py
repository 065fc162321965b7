"""A character-level Llama trained on a text of this repository, in shards, beside plain torch: one loss curve.

    torchrun --standalone --nproc-per-node 4 examples/train_sharded.py [STEPS] [FOLDER]

Under FSDP 2 x tensor 2 on gloo, with state in shards from step to step; saved; resumed under two pipeline stages of
two; and served from what was saved by a job that writes one character a step.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import shardplan as sp

TEXT = Path(__file__).resolve().parents[1] / "docs" / "concepts.md"
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "dtype": "f64"}
RATE, BATCH, SEQ, CACHE = 3e-3, 4, 32, 64


def drawn(model: sp.Model) -> dict[str, np.ndarray]:
    """Parameters to begin with, the same in every process."""
    rng, types = np.random.default_rng(0), model.program.types
    return {n: np.ones(types[n].shape) if "norm" in n else rng.normal(0, 0.1, types[n].shape) for n in model.parameters}


def batch_at(step: int, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The sequences of a step, and what follows each of their characters."""
    starts = np.random.default_rng(step).integers(0, len(ids) - SEQ - 1, BATCH)
    rows = np.stack([ids[at : at + SEQ + 1] for at in starts])
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [batch, heads, sequence, dim]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * 1e4 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def logits(w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The same model in plain torch, on whole sequences."""
    x = w["embed"][tokens]
    for k in range(SIZES["layers"]):  # type: ignore[arg-type]
        one = {name.removeprefix("layers."): value[k] for name, value in w.items() if name.startswith("layers.")}
        y = normed(x, one["attention_norm"])
        q = turned(torch.einsum("bse,egrd->bgrsd", y, one["q"]).flatten(1, 2))
        keys, values = (torch.einsum("bse,egd->bgsd", y, one[n]) for n in ("k", "v"))
        each = q.shape[1] // keys.shape[1]
        keys, values = turned(keys).repeat_interleave(each, 1), values.repeat_interleave(each, 1)
        found = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
        x = x + torch.einsum("bhsd,hde->bse", found, one["o"].flatten(0, 1))
        y = normed(x, one["mlp_norm"])
        x = x + (torch.nn.functional.silu(y @ one["gate"]) * (y @ one["up"])) @ one["down"]
    return normed(x, w["norm"]) @ w["head"].T


def plain_losses(given: dict[str, np.ndarray], ids: np.ndarray, steps: int) -> list[float]:
    """The loss curve of plain torch in one process, with torch's own optimizer."""
    w = {name: torch.tensor(x, requires_grad=True) for name, x in given.items()}
    update = torch.optim.AdamW(w.values(), RATE, weight_decay=0.01)
    out: list[float] = []
    for step in range(steps):
        batch = {name: torch.tensor(x, dtype=torch.int64) for name, x in batch_at(step, ids).items()}
        found = logits(w, batch["tokens"]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(found, batch["targets"].flatten())
        update.zero_grad()
        loss.backward()
        update.step()
        out.append(float(loss.detach()))
    return out


def served(folder: Path, vocab: int, prompt: np.ndarray, count: int) -> tuple[list[int], float]:
    """Characters written after a prompt, and how far the logits of its last are from those of plain torch."""
    model = sp.Model.load("llama", **SIZES, seq=1, vocab=vocab, training=False, cache=CACHE)
    out, apart = [int(c) for c in prompt], 0.0
    with sp.start(sp.partition(model, sp.Strategy(tensor=2)), folder, "torch") as live:
        w = {name: torch.tensor(x) for name, x in live.collect(list(model.parameters)).items()}
        for at in range(len(prompt) + count - 1):
            found = live.step({"tokens": np.array([[out[at]]], np.int32)})
            if found is None:  # a process without a device of this job
                return out, 0.0
            if at >= len(prompt) - 1:
                want = logits(w, torch.tensor([out]))[0, -1].numpy()
                apart = max(apart, float(np.abs(found[0, -1] - want).max()))
                out.append(int(found[0, -1].argmax()))
    return out[len(prompt) :], apart


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    place: list[Any] = [sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()]
    dist.broadcast_object_list(place)
    folder = Path(place[0]) / "state"
    text = TEXT.read_text(encoding="utf-8")
    letters = sorted({*text})
    ids = np.array([letters.index(c) for c in text], np.int32)
    model = sp.Model.load("llama", **SIZES, seq=SEQ, vocab=len(letters), optimizer="adamw", lr=RATE)
    given, half = drawn(model), steps // 2
    losses: list[float] = []
    job = sp.partition(model, sp.Strategy(data=2, tensor=2, fsdp=True, global_batch=BATCH))
    with sp.start(job, given, "torch") as live:
        for step in range(half):
            batch = batch_at(step, ids)
            losses.append(float(live.step({name: x[np.ix_(*live.part(name))] for name, x in batch.items()})))
        live.save(str(folder))
    job = sp.partition(model, sp.Strategy(pipeline=2, tensor=2, global_batch=BATCH))
    with sp.start(job, folder, "torch") as live:
        losses += [float(live.step(batch_at(step, ids))) for step in range(half, steps)]
        live.save(f"{folder}.last")
    said, apart = served(Path(f"{folder}.last"), len(letters), ids[:8], 24)
    if rank == 0:
        plain = plain_losses(given, ids, steps)
        most = max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))
        told = {"first": losses[0], "last": losses[-1], "plain": plain[-1], "apart": most, "served_apart": apart}
        print(json.dumps(told | {"said": "".join(letters[k] for k in said)}))
        assert most < 1e-9 and apart < 1e-9 and math.isfinite(losses[-1])
    dist.destroy_process_group()
    if rank == 0 and len(sys.argv) < 3:
        for path in sorted(folder.parent.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        os.rmdir(folder.parent)


if __name__ == "__main__":
    main()
