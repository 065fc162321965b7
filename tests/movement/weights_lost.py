"""Losses planted in refits between shipped tables: what a target does not take, copies that differ, other configs.

Each is tried in four ways: `sp.refit` and the reference, `checkpoint.reshard` of what the source's ranks hold as files,
the command, and a live join of both sides. What is lost is known from how the loss was made, not from any proof.
"""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.rank_threads import in_threads

import shardplan as sp
from shardplan.cli import run_command
from shardplan.errors import LayoutError, ShardplanError
from shardplan.interop import safetensors
from shardplan.interop.checkpoint import reshard
from shardplan.movement.weights.table import WeightTable
from shardplan.movement.weights.weights import Weights, make_weights

from .weights_cases import PAIRS
from .weights_judged import Held, Session, session

WAYS = ("refit", "reshard", "command", "live")
MOST = 12  # devices of a session: of both sides
CONFIG = {
    "rope_theta": 1e6, "rope_scaling": None, "rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-5, "hidden_act": "silu",
    "activation_function": "gelu_new",
}  # fmt: skip


@dataclass
class Loss:
    """A loss in a session: the sides as they are said, what the source's ranks hold, and what must be named.

    `drop` and `differ` are what makes it legal; neither for copies that differ.
    """

    kind: str
    says: str
    session: Session
    sides: tuple[Weights, Weights]
    held: Held
    named: tuple[str, ...]
    drop: tuple[str, ...] = ()
    differ: tuple[str, ...] = ()
    ways: tuple[str, ...] = WAYS
    found: dict[str, str] = field(default_factory=dict)


def drawn(kinds: Iterable[str], rng: random.Random, config: dict[str, Any] | None = None) -> Session:
    """A session of few devices of some kinds of models."""
    legal = [pair for pair in PAIRS if pair[0] in tuple(kinds)]
    while True:
        try:
            s = session(*rng.choice(legal), rng, {**CONFIG, **(config or {})})
        except (ValueError, IndexError):  # degrees that the sizes do not have
            continue
        if sum(len(w.devices) for w in s.weights) <= MOST:
            return s


def other(s: Session, k: int, table: WeightTable, **given: Any) -> tuple[Weights, Weights]:
    """Both sides, one with another table or other degrees."""
    side = make_weights(table, s.config, s.given[k] | given, s.weights[k].devices, "f32")
    return (side, s.weights[1]) if k == 0 else (s.weights[0], side)


def missing_parameter(rng: random.Random) -> Loss | None:
    """A parameter of the target's table is not there."""
    s = drawn(("llama", "qwen3", "qwen3-moe", "gpt2", "deepseek", "llama4", "gpt-oss", "mamba2", "lora"), rng)
    table = s.weights[1].table
    entry = rng.choice([f.entry for f in s.weights[1].families])
    left = tuple(p for p in table.parameters if p.name != entry.name)
    if not left:
        return None
    sides = other(s, 1, replace(table, parameters=left))
    lost = tuple(t for t in s.weights[0].tensors if t not in sides[1].tensors)
    if not lost:
        return None
    return Loss("parameter missing", f"{s.names[1]} without {entry.name}", s, sides, s.held[0], lost, drop=lost)


def unused_tensor(rng: random.Random) -> Loss | None:
    """The source is of a family with more tensors than the target's."""
    kind, table = rng.choice([
        ("qwen3", "vllm-llama"), ("qwen3", "hf-llama"), ("qwen3", "megatron-llama"), ("qwen3", "fsdp2-llama"),
        ("deepseek-mtp", "hf-deepseek-v3"), ("deepseek-mtp", "vllm-deepseek-v3"),
    ])  # fmt: skip
    s = drawn((kind,), rng)
    first = max(s.weights[0].devices) + 1
    try:
        target = Weights.load(table, s.config, devices=[first], dtype="f32")
    except LayoutError:
        return None
    sides = (s.weights[0], target)
    every = tuple(t for t in sides[0].tensors if t not in target.tensors)
    return Loss("tensor unused", f"{s.names[0]} to {table}", s, sides, s.held[0], every[:3], drop=every)


def missing_layer(rng: random.Random) -> Loss | None:
    """A map of stages of the target has a layer on none."""
    s = drawn(("llama", "qwen3", "mixtral", "qwen3-moe"), rng)
    if "stages" not in s.weights[1].table.rules:
        return None
    layers, given = s.config["num_hidden_layers"], s.given[1]
    parts = given.get("pipeline", 1) * given.get("chunks", 1)
    absent = rng.randrange(layers)
    order = [k for k in range(layers) if k != absent]
    ends = sorted(rng.sample(range(1, len(order)), parts - 1)) if parts <= len(order) else []
    if parts > 1 and not ends:
        return None
    rows = [order[a:b] for a, b in zip([0, *ends], [*ends, len(order)], strict=True)]
    sides = other(s, 1, s.weights[1].table, stages=rows)
    lost = tuple(t for t, x in s.weights[0].tensors.items() if str(x.dims[0]) == "l")
    return Loss(
        "layer missing",
        f"layer {absent} on no stage of {s.names[1]}",
        s,
        sides,
        s.held[0],
        (*lost[:1], f"[{absent}, "),
        drop=lost,
    )


def missing_expert(rng: random.Random) -> Loss | None:
    """A map of experts of the target has one on no rank."""
    s = drawn(("qwen3-moe", "mixtral", "deepseek"), rng)
    table = s.weights[1].table
    cuts = ("x@data*tensor.first", "x@expert", "x@ep")
    texts = [t for _, t in table.holes] + [str(p.form) for p in table.parameters]
    cut = next((c for c in cuts if any(c in t for t in texts)), None)
    if cut is None or ("x@ep" in cut and any("x@expert" in t for t in texts)):
        return None
    axes = cut.removeprefix("x@").split(".")[0].split("*")
    owners = int(np.prod([s.weights[1].degrees[a] for a in axes]))
    count = int(s.weights[1].sizing.size("x"))
    absent = rng.randrange(count)
    order = [k for k in range(count) if k != absent]
    if owners >= len(order):
        return None
    ends = [len(order) * k // owners for k in range(owners + 1)]
    rows = [order[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
    new = f"{cut.split('.')[0]}.map"
    text = table.toml().replace(cut, new)
    import tomllib

    sides = other(s, 1, WeightTable.of(tomllib.loads(text), "a map"), map=rows)
    lost = tuple(t for t in ("gate", "up", "down") if t in s.weights[0].tensors)
    return Loss("expert missing", f"expert {absent} on no rank of {s.names[1]}", s, sides, s.held[0], lost, drop=lost)


def copies(held: Held, side: Weights) -> list[tuple[int, str, int]]:
    """Elements that are there more than once, by value: every place but the first of each, in distinct values."""
    seen: dict[bytes, tuple[int, str, int]] = {}
    out: list[tuple[int, str, int]] = []
    for rank in side.devices:
        for name, array in held[rank].items():
            flat = np.ascontiguousarray(array).reshape(-1)
            for k in range(flat.size):
                key = flat[k].tobytes()
                if flat[k] and key in seen:
                    out.append((rank, name, k))
                else:
                    seen[key] = (rank, name, k)
    return out


def changed(kind: str, s: Session, rng: random.Random, names: Callable[[str], bool]) -> Loss | None:
    """One element of one copy is another number; the values of the checkpoint are made distinct before."""
    total = 1
    for name, array in s.whole.items():
        s.whole[name] = np.arange(total, total + array.size, dtype=np.float64).reshape(array.shape).astype(np.float32)
        total += array.size
    held = {r: {n: np.array(a, order="C") for n, a in named.items()} for r, named in s.loader(0)(s.whole).items()}
    at = [(r, n, k) for r, n, k in copies(held, s.weights[0]) if names(n)]
    if not at or total > 2**24:
        return None
    rank, name, k = rng.choice(at)
    was = held[rank][name].reshape(-1)[k]
    held[rank][name].reshape(-1)[k] = -was
    says = f"element {k} of {name} of rank {rank} is {-was} for {was}"
    return Loss(kind, f"{s.names[0]}: {says}", s, s.weights, held, (f"{name}", f"is {-was}", f"is {was}"),
                ways=("refit", "reshard", "command"))  # fmt: skip


def tie_broken(rng: random.Random) -> Loss | None:
    """A copy of a tied embedding, in another stage or replica, is not that of the others."""
    s = drawn(("llama", "qwen3", "mixtral", "qwen3-moe"), rng, {"tie_word_embeddings": True})
    return changed("tie broken", s, rng, lambda n: "embed" in n or "output_layer" in n or "lm_head" in n)


def replicas_differ(rng: random.Random) -> Loss | None:
    """A copy of any element is not that of the others."""
    s = drawn(("llama", "qwen3", "qwen3-moe", "mixtral", "deepseek", "gpt2", "lora"), rng)
    return changed("replicas differ", s, rng, lambda n: True)


def config_differs(rng: random.Random) -> Loss | None:
    """A field of one side's config is another: of those that set no shape, or heads whose products agree."""
    s = drawn(("llama", "qwen3", "qwen3-moe", "mixtral", "deepseek", "gpt2", "mamba2"), rng)
    known = dict(s.weights[0].table.agree)
    field_of = {
        "rope_theta": {"rope_theta": 5e5}, "norm_eps": {"rms_norm_eps": 1e-5, "layer_norm_epsilon": 1e-6},
        "rope_scaling": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "activation": {"hidden_act": "gelu", "activation_function": "gelu"},
        "experts_per_token": {"num_experts_per_tok": 3},
    }  # fmt: skip
    name = rng.choice(["heads", *(n for n in field_of if n in known)])
    k = rng.randrange(2)
    if name == "heads":
        c = s.config
        if s.kind not in ("llama", "mixtral") or c["head_dim"] % 2:
            return None
        config = {"num_attention_heads": 2 * c["num_attention_heads"], "head_dim": c["head_dim"] // 2,
                  "num_key_value_heads": 2 * c["num_key_value_heads"]}  # fmt: skip
        differ: tuple[str, ...] = ()
    else:
        config, differ = field_of[name], (name,)
    try:
        side = s.load(k, s.config | config)
    except LayoutError:
        return None
    sides = (side, s.weights[1]) if k == 0 else (s.weights[0], side)
    return Loss("config differs", f"{name} of {s.names[k]}", s, sides, s.held[0], (f"{name} is ",), differ=differ)


KINDS: dict[str, Callable[[random.Random], Loss | None]] = {
    "parameter missing": missing_parameter, "tensor unused": unused_tensor, "layer missing": missing_layer,
    "expert missing": missing_expert, "tie broken": tie_broken, "replicas differ": replicas_differ,
    "config differs": config_differs,
}  # fmt: skip


def planted(kind: str, rng: random.Random) -> Loss:
    """A loss of a kind, tried in its ways: `found` says of each what was said, nothing where it was silent."""
    while (loss := KINDS[kind](rng)) is None:
        pass
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        written(place / "source", loss)
        for k, side in enumerate(loss.sides):
            (place / f"{k}.toml").write_text(str(side))
        for way in loss.ways:
            said = tried(loss, way, place)
            loss.found[way] = said if all(name in said for name in loss.named) else ""
    return loss


def written(folder: Path, loss: Loss) -> None:
    """What the source's ranks hold, as files."""
    for place, rank in enumerate(loss.sides[0].devices):
        own = folder / f"rank-{place:05d}"
        own.mkdir(parents=True)
        named = {n: np.ascontiguousarray(a) for n, a in loss.held[rank].items()}
        safetensors.write(own / "model.safetensors", named, {"format": "pt"})


def tried(loss: Loss, way: str, place: Path, **legal: Any) -> str:
    """What is said one way, nothing where all goes well; `legal` is what makes it so."""
    source, target = loss.sides
    if way == "command":
        more = [word for name, values in legal.items() for v in values for word in (f"--{name}", v)]
        command = [
            "reshard",
            place / "source",
            place / "by command",
            "--from",
            place / "0.toml",
            "--to",
            place / "1.toml",
        ]
        with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
            status = run_command([*map(str, command), *more])
        return "" if status == 0 else err.getvalue()
    try:
        if way == "refit":
            sp.refit(source, target, **legal).apply(loss.held)
        elif way == "reshard":
            reshard(place / "source", place / "out", from_=source, to=target, **legal)
        else:
            return joined(loss)
    except ShardplanError as error:
        return str(error)
    return ""


def joined(loss: Loss) -> str:
    """What both sides of a live join say, each of which knows only itself."""
    import torch.distributed as dist

    from shardplan.interop.torch import Refit

    store = dist.HashStore()

    def body(k: int) -> str:
        weights, side = loss.sides[k], ("source", "target")[k]
        try:
            Refit.join(weights, {}, side=side, rank=weights.devices[0], store=store, timeout=20)
        except ShardplanError as error:
            return str(error)
        return ""

    said = in_threads((0, 1), body)
    return said[0] if said[0] == said[1] else ""


def allowed(loss: Loss) -> str:
    """What is said where the loss is asked for, by `refit` and the command: nothing where all else goes well."""
    legal: dict[str, Any] = {n: v for n, v in (("drop", loss.drop), ("differ", loss.differ)) if v}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        written(place / "source", loss)
        for k, side in enumerate(loss.sides):
            (place / f"{k}.toml").write_text(str(side))
        return tried(loss, "refit", place, **legal) or tried(loss, "command", place, **legal)


def alarm(s: Session) -> str:
    """What is said of a session without a loss: nothing."""
    return tried(Loss("", "", s, s.weights, s.held[0], ()), "refit", Path())
