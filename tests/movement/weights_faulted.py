"""Faults of twelve kinds, planted at random in refits between shipped tables."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from shardplan.movement.weights.form import FormAlternative, FormFactor, StoredForm
from shardplan.movement.weights.table import TableParameter, WeightTable
from shardplan.movement.weights.weights import Weights, make_weights

from .weights_cases import PAIRS, TABLES
from .weights_handles import kept_by_one, torn_by
from .weights_judged import Fault, Held, Session, session

Entry = Callable[[TableParameter], TableParameter]
MOST = 12  # devices of a session: of both sides


def retabled(s: Session, k: int, change: Callable[[WeightTable], WeightTable]) -> Callable[[], tuple[Weights, Weights]]:
    """Both sides, one with another table."""

    def sides() -> tuple[Weights, Weights]:
        own = s.weights[k]
        other = make_weights(change(own.table), s.config, s.given[k], own.devices, "f32")
        return (other, s.weights[1]) if k == 0 else (s.weights[0], other)

    return sides


def reloaded(s: Session, k: int, config: dict[str, Any] | None = None, **given: Any) -> Any:
    """Both sides, one with other degrees or another config."""

    def sides() -> tuple[Weights, Weights]:
        other = s.load(k, config, **given)
        return (other, s.weights[1]) if k == 0 else (s.weights[0], other)

    return sides


def edited(s: Session, k: int, entry: TableParameter, form: str | StoredForm) -> Any:
    """Both sides, one with another expression of a parameter."""
    new = StoredForm.parse(form) if isinstance(form, str) else form

    def change(table: WeightTable) -> WeightTable:
        return replace(table, parameters=tuple(replace(p, form=new) if p is entry else p for p in table.parameters))

    return retabled(s, k, change)


def present(s: Session, k: int) -> list[TableParameter]:
    """The entries of a side's table that this config has."""
    return [f.entry for f in s.weights[k].families]


def copied(held: Held) -> Held:
    """What ranks hold, to be changed."""
    return {rank: {n: a.copy() for n, a in named.items()} for rank, named in held.items()}


def wrong_degree(s: Session, rng: random.Random) -> Fault | None:
    """Two degrees changed places, or one is doubled at the cost of another: the devices are as many."""
    k = rng.randrange(2)
    given = s.given[k]
    names = [n for n, v in given.items() if isinstance(v, int) and n not in ("divisible", "chunks")]
    pairs = [(a, b) for a in names for b in names if given[a] > 1 and given[a] % 2 == 0 and a != b]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    new = given | {a: given[a] // 2, b: given[b] * 2}
    says = f"{s.names[k]} with {a}={new[a]}, {b}={new[b]} for {a}={given[a]}, {b}={given[b]}"
    return Fault("wrong degree", says, reloaded(s, k, **new))


def missing_shard(s: Session, rng: random.Random) -> Fault | None:
    """A parameter of a rank, rows of one, or the shard of a rank, which is another's."""
    source = copied(s.held[0])
    rank = rng.choice(list(source))
    name = rng.choice(list(source[rank]))
    what = rng.choice(["absent", "short", "another's", "not in the table"])
    says = f"{name} of rank {rank} is {what}"

    def sides() -> tuple[Weights, Weights]:
        return s.weights

    if what == "absent":
        del source[rank][name]
    elif what == "short":
        source[rank][name] = source[rank][name][:-1]
    elif what == "another's":
        other = [r for r in source if r != rank and set(source[r]) == set(source[rank])]
        if not other:
            return None
        says = f"rank {rank} has the shard of rank {other[0]}"
        source[rank] = source[other[0]]
    else:
        entry = rng.choice(present(s, 0))
        says = f"{s.names[0]} without {entry.name}"
        less = retabled(s, 0, lambda t: replace(t, parameters=tuple(p for p in t.parameters if p is not entry)))
        return Fault("missing shard", says, less)
    return Fault("missing shard", says, sides, source)


def stale_plan(s: Session, rng: random.Random) -> Fault | None:
    """One rank keeps a plan from before the other side changed, on live handles."""
    k = rng.randrange(2)
    _, degrees, _ = TABLES[s.kind][s.names[k]]
    old = s.weights[k]
    for _ in range(20):
        given = degrees(s.config, rng)
        try:
            old = s.load(k, **given)
        except Exception:  # of another number of devices, mostly
            continue
        if str(old) != str(s.weights[k]):
            break
    else:
        return None
    sides = (old, s.weights[1]) if k == 0 else (s.weights[0], old)
    if rng.random() < 0.3:
        return Fault("stale plan", f"all ranks plan for {s.names[k]} as it was with {dict(old.given)}", lambda: sides)
    rank = rng.choice(s.weights[1 - k].devices)
    says = f"rank {rank} plans for {s.names[k]} as it was with {dict(old.given)}"
    return Fault("stale plan", says, lambda: s.weights, run=kept_by_one(s, sides, rank))


def torn_refit(s: Session, rng: random.Random) -> Fault | None:
    """A rank is lost within a call: at one of its rounds, before the last, or where the engine finishes."""
    everyone = [*s.weights[0].devices, *s.weights[1].devices]
    rank = rng.choice(everyone)
    return Fault(
        "torn refit", f"rank {rank} fails within a call", lambda: s.weights, run=torn_by(s, rank, rng.random())
    )


def _alternatives(form: StoredForm) -> Iterable[tuple[FormFactor, tuple[FormAlternative, ...]]]:
    """The sums of a form, with their addends."""

    def walk(factors: tuple[FormFactor, ...]) -> Iterable[tuple[FormFactor, tuple[FormAlternative, ...]]]:
        for f in factors:
            if not isinstance(f.item, str):
                if len(f.item) > 1:
                    yield f, f.item
                for a in f.item:
                    yield from walk(a.factors)

    for dim in form.dims:
        yield from walk(dim)


def _renamed(text: str, a: str, b: str) -> str:
    return text.replace(f"{a}:", "\0:").replace(f"{b}:", f"{a}:").replace("\0:", f"{b}:")


def swapped(s: Session, rng: random.Random) -> Fault | None:
    """Two projections change places: in an expression, in the names of a table, or in the tensors."""
    where = rng.choice(["expression", "names", "tensors"])
    k = rng.randrange(2)
    if where == "expression":
        found = [(p, alts) for p in present(s, k) for _, alts in _alternatives(p.form)
                 if all(a.tensor for a in alts[:2])]  # fmt: skip
        if not found:
            return None
        entry, alts = rng.choice(found)
        a, b = (str(x.tensor) for x in rng.sample([x for x in alts if x.tensor], 2))
        says = f"{a} and {b} of {entry.name} in {s.names[k]}"
        return Fault("swapped projections", says, edited(s, k, entry, _renamed(str(entry.form), a, b)))
    if where == "names":
        entries = present(s, k)
        pairs = [(p, q) for p in entries for q in entries if p is not q and p.places == q.places and p.on == q.on
                 and len(p.form.dims) == len(q.form.dims) > 1]  # fmt: skip
        if not pairs:
            return None
        p, q = rng.choice(pairs)
        forms = {id(p): q.form, id(q): p.form}

        def change(t: WeightTable) -> WeightTable:
            return replace(t, parameters=tuple(replace(x, form=forms.get(id(x), x.form)) for x in t.parameters))

        return Fault("swapped projections", f"{p.name} and {q.name} in {s.names[k]}", retabled(s, k, change))
    source = copied(s.held[0])
    first = next(iter(source.values()))
    pairs2 = [(a, b) for a in first for b in first if a < b and first[a].shape == first[b].shape and first[a].ndim > 1]
    if not pairs2:
        return None
    a, b = rng.choice(pairs2)
    for named in source.values():
        if a in named and b in named:
            named[a], named[b] = named[b], named[a]
    return Fault("swapped projections", f"{a} holds {b} at the source", lambda: s.weights, source)


def off_by_one_block(s: Session, rng: random.Random) -> Fault | None:
    """Scales: moved by a block, rounded down, of another block, cut where the weight is not, or for another part."""
    k = rng.randrange(2)
    what = rng.choice(["moved", "fewer", "block", "order", "cut"])
    if what == "moved":
        source = copied(s.held[0])
        names = sorted({n for named in source.values() for n in named if "scale" in n})
        name = rng.choice(names)
        for named in source.values():
            if name in named:
                named[name] = np.roll(named[name], 1, axis=rng.randrange(named[name].ndim))
        return Fault("scale off by one block", f"{name} moved by one at the source", lambda: s.weights, source)
    if what == "fewer":
        atoms = [(a, t) for a, t in s.weights[k].table.atoms if t.startswith("ceil(") and "block" in t]
        if not atoms:
            return None
        atom, text = rng.choice(atoms)
        new = f"{text} - 1"
        says = f"{atom} = {new} in {s.names[k]}"
        return Fault(
            "scale off by one block", says,
            retabled(s, k, lambda t: replace(t, atoms=tuple((a, new if a == atom else x) for a, x in t.atoms))),
        )  # fmt: skip
    if what == "block":
        if "weight_block_size" not in s.config:
            return None
        config = s.config | {"weight_block_size": 2 * s.config["weight_block_size"]}
        return Fault("scale off by one block", f"blocks twice as large for {s.names[k]}", reloaded(s, k, config))
    scales = [p for p in present(s, k) if "scale" in p.name]
    entry = rng.choice(scales)
    if what == "order":
        sums = [alts for _, alts in _alternatives(entry.form)]
        if not sums:
            return None
        a, b = str(sums[0][0].tensor), str(sums[0][1].tensor)
        return Fault(
            "scale off by one block", f"{a} and {b} of {entry.name} in {s.names[k]}",
            edited(s, k, entry, _renamed(str(entry.form), a, b)),
        )  # fmt: skip
    if "@" not in str(entry.form):
        return None
    rule = rng.choice([".robin", ".last", ".first"])
    form = str(entry.form).replace(".ceil", rule)
    return Fault("scale off by one block", f"{entry.name} cut {rule} in {s.names[k]}", edited(s, k, entry, form))


def wrong_heads(s: Session, rng: random.Random) -> Fault | None:
    """Heads counted otherwise: rows stay as many where the head's size goes the other way."""
    c = s.config
    if c["kind"] in ("deepseek", "mamba2", "gpt2"):
        return None
    h, g, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    new = rng.choice(
        [{"num_attention_heads": 2 * h, "num_key_value_heads": 2 * g, "head_dim": d // 2},
         {"num_attention_heads": h // 2, "num_key_value_heads": max(g // 2, 1), "head_dim": 2 * d},
         {"num_key_value_heads": 2 * g}, {"num_key_value_heads": h}]
    )  # fmt: skip
    wrong = c | new
    both = rng.random() < 0.6
    k = rng.randrange(2)

    def sides() -> tuple[Weights, Weights]:
        a, b = (s.load(i, wrong if both or i == k else c) for i in (0, 1))
        return a, b

    said = ", ".join(f"{n}={v}" for n, v in new.items())
    return Fault("wrong heads", f"{said} for {'both sides' if both else s.names[k]}", sides)


def transposed(s: Session, rng: random.Random) -> Fault | None:
    """Two dims of a parameter changed places, in the table or in a tensor."""
    k = rng.randrange(2)
    if rng.random() < 0.5:
        entries = [p for p in present(s, k) if len(p.form.dims) > 1]
        entry = rng.choice(entries)
        dims = list(entry.form.dims)
        dims[-1], dims[-2] = dims[-2], dims[-1]
        says = f"{entry.name} of {s.names[k]}"
        return Fault("transposed dims", says, edited(s, k, entry, StoredForm(entry.form.tensor, tuple(dims))))
    source = copied(s.held[0])
    names = sorted({n for named in source.values() for n, a in named.items() if a.ndim > 1})
    square = [n for n in names if all(named[n].shape[-1] == named[n].shape[-2] for named in source.values()
                                      if n in named)]  # fmt: skip
    name = rng.choice(square or names)
    for named in source.values():
        if name in named:
            named[name] = np.ascontiguousarray(np.swapaxes(named[name], -1, -2))
    return Fault("transposed dims", f"{name} at the source", lambda: s.weights, source)


def padding_dropped(s: Session, rng: random.Random) -> Fault | None:
    """Padding left out, put before, or of another multiple."""
    k = rng.randrange(2)
    entries = [p for p in present(s, k) if "| 0: " in str(p.form)]
    if not entries:
        return None
    entry = rng.choice(entries)
    text = str(entry.form)
    inner = text[text.index("(") + 1 : text.index(" | 0: ")]
    pad = text[text.index("| 0: ") + 5 : text.index(")")]
    what = rng.choice(["left out", "put before", "of another multiple"])
    if what == "of another multiple":
        atoms = tuple((a, f"{x} + 1" if a == pad else x) for a, x in s.weights[k].table.atoms)
        says = f"{pad} is one more in {s.names[k]}"
        return Fault("padding dropped", says, retabled(s, k, lambda t: replace(t, atoms=atoms)))
    new = f"({inner})" if what == "left out" else f"(0: {pad} | {inner})"
    form = text.replace(f"({inner} | 0: {pad})", new)
    return Fault("padding dropped", f"{what} in {entry.name} of {s.names[k]}", edited(s, k, entry, form))


def wrong_stages(s: Session, rng: random.Random) -> Fault | None:
    """Layers of stages counted otherwise, or stages and chunks in another order."""
    k = rng.randrange(2)
    given = s.given[k]
    parts = given.get("pipeline", 1) * given.get("chunks", 1)
    if parts < 2:
        return None
    layers = s.config.get("num_hidden_layers") or s.config["n_layer"]
    if given.get("chunks", 1) > 1 and given.get("pipeline", 1) > 1 and rng.random() < 0.5:

        def change(t: WeightTable) -> WeightTable:
            return replace(t, holes=tuple((h, x.replace("c*pipeline", "pipeline*c")) for h, x in t.holes))

        return Fault("wrong stages", f"stages before chunks in {s.names[k]}", retabled(s, k, change))
    if "stages" not in s.weights[k].table.rules:
        rule = ".first"
        says = f"{s.names[k]} cut {rule} for .last"
        return Fault("wrong stages", says, retabled(
            s, k, lambda t: replace(t, holes=tuple((h, x.replace(".last", rule)) for h, x in t.holes))))  # fmt: skip
    right = given.get("stages") or [layers // parts] * parts
    what = rng.choice(["permuted", "moved", "order"])
    new: list[Any] = list(right)
    if what == "permuted":
        rng.shuffle(new)
    elif what == "moved":
        new[0], new[-1] = new[0] + 1, new[-1] - 1
    else:
        ends = np.cumsum([0, *right]).tolist()
        new = [list(range(a, b)) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        i, j = rng.sample(range(parts), 2)
        if len(new[i]) == len(new[j]):
            new[i], new[j] = new[j], new[i]
        else:
            new[i] = new[i][::-1]
    if new == right or min(new, key=lambda x: x if isinstance(x, int) else 1) in (0, -1):
        return None
    says = f"stages={new} for {right} in {s.names[k]}"
    return Fault("wrong stages", says, reloaded(s, k, **(given | {"stages": new})))


def wrong_experts(s: Session, rng: random.Random) -> Fault | None:
    """Experts on other ranks: another rule, another order of axes, or a map that is not the engine's."""
    k = rng.randrange(2)
    holes, forms = dict(s.weights[k].table.holes), [str(p.form) for p in present(s, k)]
    texts = [t for t in [holes.get("x", ""), *forms] if t.startswith(("x@", "down = x@", "(x@"))]
    if not texts:
        return None
    rule = rng.choice([".robin", ".last", "tensor*data", ".map"])

    def other(text: str) -> str:
        if rule == "tensor*data":
            return text.replace("x@data*tensor", "x@tensor*data")
        for cut in ("x@data*tensor.first", "x@expert", "x@ep", "x@data.ceil"):
            if cut in text:
                return text.replace(cut, cut.split(".")[0] + rule)
        return text

    def change(t: WeightTable) -> WeightTable:
        entries = tuple(replace(p, form=StoredForm.parse(other(str(p.form)))) for p in t.parameters)
        return replace(t, parameters=entries, holes=tuple((h, other(x)) for h, x in t.holes))

    if rule != ".map":
        return Fault("wrong experts", f"experts {rule} in {s.names[k]}", retabled(s, k, change))
    side, given = s.weights[k], s.given[k]
    count = int(side.sizing.tensor("router").sizes[1])
    axes = texts[0].split("x@")[1].split(",")[0].split(".")[0].split("*")
    owners = int(np.prod([side.degrees[a] for a in axes]))
    base, more = divmod(count, owners)
    order = rng.sample(range(count), count)
    ends = np.cumsum([0, *(base + (i < more) for i in range(owners))]).tolist()
    table = [order[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def sides() -> tuple[Weights, Weights]:
        own = make_weights(change(side.table), s.config, given | {"map": table}, side.devices, "f32")
        return (own, s.weights[1]) if k == 0 else (s.weights[0], own)

    return Fault("wrong experts", f"experts {table} in {s.names[k]}", sides)


def tie_broken(s: Session, rng: random.Random) -> Fault | None:
    """The head is said to be the embedding and is not, the other way round, or its copy on the last stage differs."""
    tied = bool(s.config.get("tie_word_embeddings"))
    what = rng.choice(["one side", "both sides", "copy"])
    wrong = s.config | {"tie_word_embeddings": not tied}
    if what == "copy":
        source = copied(s.held[0])
        copies = [(r, n) for r, named in source.items() for n in named if "embed" in n or "output_layer" in n]
        if not tied or len(copies) < 2:
            return None
        rank, name = rng.choice(copies)
        source[rank][name] = source[rank][name] + np.float32(1)
        return Fault("tie broken", f"{name} of rank {rank} is not its copies' at the source", lambda: s.weights, source)
    k = rng.randrange(2)

    def sides() -> tuple[Weights, Weights]:
        a, b = (s.load(i, wrong if what == "both sides" or i == k else s.config) for i in (0, 1))
        return a, b

    return Fault(
        "tie broken", f"tie_word_embeddings={not tied} for {what if what != 'one side' else s.names[k]}", sides
    )


KINDS: dict[str, Callable[[Session, random.Random], Fault | None]] = {
    "wrong degree": wrong_degree, "missing shard": missing_shard, "stale plan": stale_plan, "torn refit": torn_refit,
    "swapped projections": swapped, "scale off by one block": off_by_one_block, "wrong heads": wrong_heads,
    "transposed dims": transposed, "padding dropped": padding_dropped, "wrong stages": wrong_stages,
    "wrong experts": wrong_experts, "tie broken": tie_broken,
}  # fmt: skip
MODELS = {
    "scale off by one block": ("deepseek-fp8", "gpt-oss-mxfp4"),
    "wrong experts": ("qwen3-moe", "mixtral", "deepseek"),
    "stale plan": ("llama", "qwen3", "qwen3-moe", "mixtral"), "torn refit": ("llama", "qwen3", "qwen3-moe", "gpt2"),
    "tie broken": ("llama", "qwen3", "qwen3-moe", "mixtral", "deepseek", "mamba2"),
}  # fmt: skip


def drawn(kind: str, rng: random.Random) -> tuple[Session, Fault]:
    """A session of few devices and a fault of a kind in it."""
    legal = [pair for pair in PAIRS if pair[0] in MODELS.get(kind, (pair[0],))]
    while True:
        model, a, b = rng.choice(legal)
        square = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": rng.choice([2, 4]), "head_dim": 2,
                  "intermediate_size": 8} if kind == "transposed dims" else {}  # fmt: skip
        if model not in ("llama", "qwen3", "qwen3-moe", "mixtral"):
            square = {}
        try:
            s = session(model, a, b, rng, square)
        except (ValueError, IndexError):  # degrees that the forced sizes do not have
            continue
        if sum(len(w.devices) for w in s.weights) > MOST:
            continue
        fault = KINDS[kind](s, rng)
        if fault is not None:
            return s, fault
