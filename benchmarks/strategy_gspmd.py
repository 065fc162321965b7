"""What a training step moves under strategies, ours beside GSPMD's, by the bytes of compiled programs.

`python -m benchmarks.strategy_gspmd`. A small Llama, and a mixture of experts, in plain `jax.numpy`, with the same
weights and products, compiled for 8 virtual CPU devices with the layouts of our tables: parameters and inputs as
`stored`, and the residual stream constrained to what its axes serve. The peer computes our loss and our next
parameters to 1e-4, once for each row.

XLA for CPU has no pass that makes a reduce-scatter of an all-reduce and the slice behind it, which it has for
accelerators. `scattered` counts an all-reduce whose every use is a slice, `1/q` of it kept, as that reduce-scatter.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
from benchmarks.common import arguments, record, table, write
from benchmarks.processes import with_devices
from benchmarks.strategy_ours import (
    DEVICES,
    LAYERS,
    RATE,
    SIZES,
    TOPOLOGY,
    Moved,
    far,
    filled,
    job_of,
    load,
    moved,
    per_layer,
    stepped,
    told,
    total,
)

from shardplan import Job, LayoutError, Layouts
from shardplan.core.mesh import Mesh
from shardplan.core.op import Op
from shardplan.core.ops import AllGather, AllReduce, AllToAll, ReduceScatter
from shardplan.core.tensor import TensorType
from shardplan.interop.hlo import HloCollective, parse_hlo
from shardplan.interop.hlo_groups import parse_groups
from shardplan.strategy.partition.memory import certify

# Of each row: the strategy; where the residual stream lies; points of a layer that are constrained beside it, each with
# the axes of its dims; more of the model; why it differs.
Axes = str | tuple[str, ...] | None
Row = tuple[dict[str, Any], tuple[Axes, Axes], dict[str, tuple[Axes, ...]], dict[str, Any], str]
TENSOR: dict[str, Any] = {"data": 2, "tensor": 4}
SEQUENCE, CONTEXT = TENSOR | {"sequence_parallel": True}, {"data": 2, "context": 4}
FSDP, KEYS = {"data": 8, "fsdp": True}, CONTEXT | {"context_kind": "gather"}
WIDE, ROWS_OF, WHOLE = ("data", None, "tensor"), ("data", "context"), ("data", None)
INSIDE = {"made": WIDE, "mixed": WIDE, "wide": WIDE}
HEADS = {"made": ROWS_OF, **dict.fromkeys(("queries", "keys", "mixed"), ("data", None, "context")), "joined": ROWS_OF}
KEPT = {"made": ROWS_OF, "queries": ROWS_OF, "keys": WHOLE, "mixed": ROWS_OF}
ROWS: dict[str, Row] = {
    "data 8": ({"data": 8}, WHOLE, {}, {}, "Equal."),
    "tensor 4 x data 2": (
        TENSOR,
        WHOLE,
        {},
        {},
        (
            "GSPMD reduces the cotangents of q, k, v and of gate, up each by itself, 5 backward where ours adds them "
            "while partial, 2; XLA's pass all-reduce-reassociate, which did not run here, does that."
        ),
    ),
    "tensor 4 x data 2, 4 kv heads": (TENSOR, WHOLE, {}, {"kv_heads": 4}, "As with 8."),
    "sequence 4 x data 2": (
        SEQUENCE,
        ("data", "tensor"),
        {},
        {},
        (
            "Only the residual stream is constrained: the axis stays on the sequence inside the layer, so every "
            "weight is gathered, forward and backward, and softmax and values are reduced over keys."
        ),
    ),
    "sequence 4 x data 2, inside too": (
        SEQUENCE,
        ("data", "tensor"),
        INSIDE,
        {},
        (
            "As ours gather by gather, kept by neither; GSPMD reduces 5 cotangents of products where ours adds them "
            "first, 2."
        ),
    ),
    "fsdp 8": (FSDP, WHOLE, {}, {}, "Equal where all-reduces that are sliced are reduce-scatters."),
    "fsdp 8, weights too": (
        FSDP,
        WHOLE,
        {"weights": ()},
        {},
        (
            "GSPMD keeps gathered weights from the forward to the backward pass: fewer bytes, and all weights in "
            "memory. This strategy of ours gathers again; the next row keeps them."
        ),
    ),
    "fsdp 8, weights kept": (
        FSDP | {"zero": 2},
        WHOLE,
        {"weights": ()},
        {},
        "Both keep gathered weights; equal where all-reduces that are sliced are reduce-scatters.",
    ),
    "fsdp 8, weights kept, joined": (
        FSDP | {"zero": 2, "bucket": "1 GB"},
        WHOLE,
        {"weights": ()},
        {},
        "As above, and a layer's parameters are gathered at once, and its gradients reduced at once.",
    ),
    "fsdp 8, joined": (
        FSDP | {"bucket": "1 GB"},
        WHOLE,
        {},
        {},
        (
            "The bytes of fsdp 8, fewer messages: a layer's parameters are gathered at once, and its gradients reduced "
            "at once."
        ),
    ),
    "fsdp 8, weights too, layers again": (
        FSDP,
        WHOLE,
        {"weights": (), "again": ()},
        {},
        "Recomputed, GSPMD gathers as often as ours; equal where all-reduces that are sliced are reduce-scatters.",
    ),
    "context 4 x data 2": (
        CONTEXT,
        ROWS_OF,
        {},
        {},
        (
            "GSPMD gathers queries and cotangents and reduces over keys, and reduces every gradient over context, "
            "then over data, 2.5 times its bytes where one reduction over both takes 1.75."
        ),
    ),
    "context 4 x data 2, heads too": (
        CONTEXT,
        ROWS_OF,
        HEADS,
        {},
        (
            "All-to-alls of the same bytes; GSPMD reduces gradients over context, then over data: 2.5 times their "
            "bytes beside 1.75."
        ),
    ),
    "gathered keys 4 x data 2": (
        KEYS,
        ROWS_OF,
        {},
        {},
        "The same annotations as context 4 x data 2, so the same program of GSPMD.",
    ),
    "gathered keys 4 x data 2, keys too": (
        KEYS,
        ROWS_OF,
        KEPT,
        {},
        (
            "GSPMD reduces gradients over context, then over data, 2.5 times their bytes beside 1.75; it keeps "
            "gathered keys and values, ours gathers them again backward (49,152 bytes more)."
        ),
    ),
    "gathered keys 4 x data 2, keys kept": (
        KEYS | {"keep": "sequence"},
        ROWS_OF,
        KEPT,
        {},
        (
            "Both keep gathered keys and values; GSPMD reduces gradients over context, then over data, 2.5 times "
            "their bytes beside 1.75."
        ),
    ),
}
MIXTURE = {"family": "moe", "experts": 8, "experts_per_token": 2}
ROWS |= {
    "expert 8": (
        {"data": 8, "expert": 8},
        ("expert", None),
        {"slots": (None, "expert", None, None)},
        MIXTURE,
        (
            "GSPMD gathers the scores of routers, whose top_k it does not shard, and backward the cotangent of what is "
            "combined; that takes it one exchange more."
        ),
    ),
    "expert 4 x data 2": (
        {"data": 8, "expert": 4},
        (("data", "expert"), None),
        {"slots": ("data", "expert", None, None)},
        MIXTURE,
        "As with expert 8, and its gradients take two reductions a layer.",
    ),
    "expert 8, both ways": (
        {"data": 8, "expert": 8},
        ("expert", None),
        {"slots": (None, "expert", None, None), "filled": ("expert", None, None, None)},
        MIXTURE,
        "Constrained at both ends of each exchange; the scores are still gathered for top_k.",
    ),
}
SLICED_THROUGH = ("get-tuple-element", "bitcast", "copy", "reshape", "transpose")


def llama(lay: Any, weight: Any, again: bool) -> Any:
    """The loss of parameters and a batch; `lay` constrains a value at a point, `weight` a parameter by its name.

    `again`: of a layer only its input is kept for the backward pass.
    """
    import jax
    import jax.numpy as jnp

    def norm(x: Any, gain: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * gain

    def turned(x: Any) -> Any:
        half = x.shape[-1] // 2
        angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
        angle = angle.reshape(x.shape[1], *[1] * (x.ndim - 3), half)
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)

    def product(point: str, spec: str, x: Any, w: Any) -> Any:
        return lay(point, jnp.einsum(spec, x, w))

    def routed(y: Any, w: dict[str, Any]) -> Any:
        """Experts with slots for their share of a sequence; a choice takes the next one, those behind the last go."""
        (b, s, _), n = y.shape, w["router"].shape[-1]
        k = MIXTURE["experts_per_token"]
        slots = -(-s * k // n)
        best, chosen = jax.lax.top_k(jnp.einsum("bsh,hn->bsn", y, w["router"]), k)
        hot = jax.nn.one_hot(chosen.reshape(b, s * k), n, dtype=jnp.int32)
        place = jnp.sum((jnp.cumsum(hot, 1) - hot) * hot, -1)  # behind the last slot one_hot is zero
        sent = (hot[..., None] * jax.nn.one_hot(place, slots, dtype=jnp.int32)[..., None, :]).astype(y.dtype)
        sent = sent.reshape(b, s, k, n, slots)
        x = lay("slots", lay("filled", jnp.einsum("bskec,bsh->bech", sent, y)))
        gate, up = (jnp.einsum("bech,ehf->becf", x, w[f"expert_{name}"]) for name in ("gate", "up"))
        made = lay("slots", jnp.einsum("becf,efh->bech", jax.nn.silu(gate) * up, w["expert_down"]))
        return jnp.einsum("bskec,bech,bsk->bsh", sent, lay("filled", made), jax.nn.softmax(best, -1))

    def layer(x: Any, row: dict[str, Any]) -> tuple[Any, None]:
        w = {name: weight(f"layers.{name}", value) for name, value in row.items()}
        y = lay("normed", norm(x, w["attention_norm"]))
        q = lay("queries", turned(product("made", "bsh,hgrd->bsgrd", y, w["q"])))
        k = lay("keys", turned(product("made", "bsh,hgd->bsgd", y, w["k"])))
        v = lay("keys", product("made", "bsh,hgd->bsgd", y, w["v"]))
        scores = jnp.einsum("bsgrd,btgd->bgrst", q, k) * q.shape[-1] ** -0.5
        at = jnp.arange(x.shape[1])
        scores = jnp.where(at[:, None] >= at[None, :], scores, -1e30)
        mixed = lay("joined", product("mixed", "bgrst,btgd->bsgrd", jax.nn.softmax(scores, -1), v))
        x = lay("stream", x + product("added", "bsgrd,grdh->bsh", mixed, w["o"]))
        y = lay("normed", norm(x, w["mlp_norm"]))
        if "router" in w:
            return lay("stream", x + routed(y, w)), None
        gate, up = (product("wide", "bsh,hf->bsf", y, w[name]) for name in ("gate", "up"))
        inside = lay("wide", jax.nn.silu(gate) * up)
        return lay("stream", x + product("added", "bsf,fh->bsh", inside, w["down"])), None

    if again:
        layer = jax.checkpoint(layer)

    def loss(parameters: dict[str, Any], tokens: Any, targets: Any) -> Any:
        stacks = {n.removeprefix("layers."): value for n, value in parameters.items() if n.startswith("layers.")}
        x = lay("stream", weight("embed", parameters["embed"])[tokens])
        x, _ = jax.lax.scan(layer, x, stacks)
        y = lay("normed", norm(x, weight("norm", parameters["norm"])))
        logits = product("wide", "bsh,vh->bsv", y, weight("head", parameters["head"]))
        hit = targets[..., None] == jnp.arange(logits.shape[-1])
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(hit, logits, 0.0), -1))

    return loss


def compiled(layers: int, name: str) -> tuple[Job, Any, dict[str, Any]]:
    """Our job of a row; GSPMD's step, compiled, and the shardings of its inputs."""
    import jax
    from jax.lax import with_sharding_constraint
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    strategy, residual, points, more, _ = ROWS[name]
    job = job_of(layers, strategy, **more)
    ours = job.strategy.mesh(job.model)
    mesh = Mesh(np.array(jax.devices()).reshape(ours.sizes), ours.axes)
    places = {**points, "stream": residual, "added": points.get("added", residual if points else ())}

    def laid(x: Any, spec: Any) -> Any:
        return with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def lay(point: str, x: Any) -> Any:
        return laid(x, places[point]) if places.get(point) else x

    def weight(name: str, value: Any) -> Any:
        dims = [d for d in job.model.dims[name] if d != "layer"]
        return laid(value, job.layouts.held_layout(name, dims, ours).spec) if "weights" in points else value

    loss = llama(lay, weight, "again" in points)
    shardings = {n: NamedSharding(mesh, PartitionSpec(*t.layout.spec)) for n, t in job.state.items()
                 if n in job.model.parameters or n in job.batch}  # fmt: skip

    def step(given: dict[str, Any]) -> Any:
        parameters = {n: given[n] for n in job.model.parameters}
        found, gradients = jax.value_and_grad(loss)(parameters, given["tokens"], given["targets"])
        return found, {n: value - RATE * gradients[n] for n, value in parameters.items()}

    after = {n: shardings[n] for n in job.model.parameters}
    f = jax.jit(step, in_shardings=(shardings,), out_shardings=(None, after))
    types = job.model.program.types
    given = {n: jax.ShapeDtypeStruct(types[n].shape, "f4" if n in after else "i4") for n in shardings}
    return job, f.lower(given).compile(), shardings


class Text:
    """The instructions of a compiled module, and who uses them."""

    def __init__(self, text: str) -> None:
        self.found: dict[str, tuple[str, str, list[str], str]] = {}  # by name: shape, opcode, operands, attributes
        self.users: dict[str, list[str]] = {}
        self.parameters: dict[tuple[str, int], str] = {}
        self.roots: set[str] = set()
        inside = ""
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            if header := re.match(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
                inside = header[1]
            elif one := re.match(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$", line):
                root, name, shape, opcode, said, attributes = one.groups()
                operands = re.findall(r"%([\w.\-]+)", said)
                self.found[name] = shape, opcode, operands, attributes
                for operand in dict.fromkeys(operands):
                    self.users.setdefault(operand, []).append(name)
                if opcode == "parameter":
                    self.parameters[inside, int(said)] = name
                if root:
                    self.roots.add(name)

    def elements(self, name: str) -> list[tuple[str, int]]:
        """The results of an instruction, one or a tuple of them, each with its bytes."""
        if self.found[name][0].startswith("("):
            return [(user, size(self.found[user][0])) for user in self.users.get(name, ())]
        return [(name, size(self.found[name][0]))]

    def sliced(self, name: str, kept: int) -> bool:
        """Say whether every use of a value cuts it down to some bytes."""
        if name in self.roots:
            return False
        return bool(self.users.get(name)) and all(self._cut(user, name, kept) for user in self.users[name])

    def _cut(self, user: str, name: str, kept: int) -> bool:
        shape, opcode, operands, attributes = self.found[user]
        if opcode == "dynamic-slice":
            return operands[0] == name and size(shape) <= kept
        if opcode in SLICED_THROUGH:
            return self.sliced(user, kept)
        called = re.search(r"(?:calls|to_apply)=%([\w.\-]+)", attributes)
        if opcode not in ("fusion", "call") or not called:
            return False
        return all(self.sliced(self.parameters[called[1], k], kept) for k, o in enumerate(operands) if o == name)


def size(shape: str) -> int:
    """The bytes of an array in text; no other is reduced here."""
    found = re.match(r"f32\[([\d,]*)\]", shape)
    return 4 * math.prod(int(n) for n in found[1].split(",") if n) if found else 0


def scattered(text: str) -> dict[str, int]:
    """By the name of an all-reduce the bytes of what is only sliced after it."""
    module, out = Text(text), dict[str, int]()
    for name, (_, opcode, _, attributes) in module.found.items():
        if opcode == "all-reduce":
            q = len(parse_groups(attributes, DEVICES)[0])
            out[name] = sum(n for element, n in module.elements(name) if module.sliced(element, -(-n // q)))
    return out


def theirs(text: str) -> tuple[Moved, Moved]:
    """What a compiled module moves: as it is, and with reduce-scatters where all is sliced."""
    cut, found = scattered(text), parse_hlo(text, DEVICES)
    plain = [(c, c.kind, c.operand_bytes, c.output_bytes) for c in found]
    better = [
        (c, kind, n, c.output_bytes)
        for c in found
        for kind, n in ((c.kind, c.operand_bytes - cut.get(c.name, 0)), ("reduce-scatter", cut.get(c.name, 0)))
        if n or kind == c.kind != "all-reduce"
    ]
    return total(map(typed, plain)), total(map(typed, better))


def typed(one: tuple[HloCollective, str, int, int]) -> tuple[int, Op, tuple[TensorType, ...]]:
    """A collective as an op on bytes, all its groups at once."""
    c, kind, n, _ = one
    if not c.groups:
        raise ValueError(f"{c}: permutes are not counted here")
    q = len(c.groups[0])
    op, text = {
        "all-gather": (AllGather(0, ("x",)), f"u8[{n * q}@x]"),
        "reduce-scatter": (ReduceScatter(0, ("x",)), f"u8[{n}]{{+x}}"),
        "all-reduce": (AllReduce(("x",)), f"u8[{n}]{{+x}}"),
        "all-to-all": (AllToAll(0, 1, ("x",)), f"u8[{q}@x, {n}]"),
    }[kind]
    mesh = Mesh({"g": len(c.groups), "x": q}, devices=[d for group in c.groups for d in group])
    return 1, op, (TensorType.parse(text, mesh),)


def row(name: str) -> dict[str, Any]:
    """A row: ours and theirs, of two depths and a layer."""
    import jax

    sides: dict[str, list[Moved]] = {"ours": [], "gspmd": [], "gspmd, scattered": []}
    off = []
    for layers in LAYERS:
        job, f, shardings = compiled(layers, name)
        given = filled(load(layers, **ROWS[name][3]))
        loss, after = f({n: jax.device_put(given[n], s) for n, s in shardings.items()})
        want = stepped(load(layers, **ROWS[name][3]), given)
        off.append(far(float(loss), {n: np.asarray(value) for n, value in after.items()}, want))
        assert off[-1] < 1e-4, f"{name}: the peer is {off[-1]} off"
        for side, found in zip(sides, (moved(job), *theirs(f.as_text())), strict=True):
            sides[side].append(found)
    out: dict[str, Any] = {"strategy": name, "off": max(off), "tables": str(job.layouts)}
    out["ours without serve"] = free(*ROWS[name][::3])
    for side, (less, more) in sides.items():
        out[side] = {"step": asdict(less), "layer": asdict(per_layer(less, more))}
    ours, plain, better = (out[side]["layer"]["received"] for side in sides)
    return out | {"ratio": plain / ours, "ratio, scattered": better / ours, "why": ROWS[name][4]}


def free(strategy: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """What a layer of ours moves and computes on the worst device where the tables do not say what axes serve."""
    tables = job_of(LAYERS[0], strategy, **more).layouts
    tables = Layouts((), tables.stored, tables.held)
    try:
        jobs = [job_of(layers, strategy, tables, **more) for layers in LAYERS]
    except LayoutError as e:
        return {"refused": str(e)}
    flops = [certify(j).flops[0] for j in (*jobs, *(job_of(layers, strategy, **more) for layers in LAYERS))]
    times = (flops[1] - flops[0]) / (flops[3] - flops[2])
    return {"layer": asdict(per_layer(*map(moved, jobs))), "flops, times those with serve": times}


def without(r: dict[str, Any]) -> tuple[Any, Any]:
    """Bytes and flops of a row without serve."""
    one = r["ours without serve"]
    return ("refused", None) if "refused" in one else (one["layer"]["received"], one["flops, times those with serve"])


def main() -> None:
    parser = arguments("strategy_gspmd", "What strategies move, ours beside GSPMD's.", len(ROWS), of="rows")
    parser.add_argument("--child", action="store_true", help="run in this process, and print JSON")
    options = parser.parse_args()
    names = list(ROWS)[: options.count]
    if options.child:
        found = []
        for name in names:
            found.append(row(name))
            print(name, file=sys.stderr, flush=True)
        print(json.dumps(found))
        return
    found = with_devices(DEVICES, "strategy_gspmd", "--child", "--count", options.count)
    sides = ("ours", "gspmd", "gspmd, scattered")
    shown = [
        [r["strategy"], *(r[s]["layer"]["received"] for s in sides), r["ratio"], r["ratio, scattered"],
         *(r[s]["step"]["received"] for s in sides), *(told(r[s]["layer"]["counts"]) for s in sides[:2])]
        for r in found
    ]  # fmt: skip
    heads = (
        "strategy",
        *(f"{s}, a layer" for s in sides),
        "ratio",
        "scattered",
        *(f"{s}, a step of {LAYERS[0]}" for s in sides),
        "ours, a layer",
        "gspmd, a layer",
    )
    print(table(heads, shown, f"bytes that the worst of {DEVICES} devices receives, f32"))
    seconds = [[r["strategy"], *(1e6 * r[s]["layer"]["seconds"] for s in sides), *without(r)] for r in found]
    heads = ("strategy", *(f"{s}, us" for s in sides), "ours without serve", "flops, times those with serve")
    print(table(heads, seconds, f"a layer: collectives one by one on {TOPOLOGY.name}; bytes and flops without serve"))
    print("\n" + "\n".join(f"{r['strategy']}: {r['why']}" for r in found))
    write(
        options.out,
        record({"count": options.count, "sizes": SIZES, "layers": LAYERS, "priced on": TOPOLOGY.name}, {"rows": found}),
    )


if __name__ == "__main__":
    main()
