"""Random small models and strategies: a recipe is data that Hypothesis shrinks, and is cooked for any batch.

A recipe's lines have numbers, which choose among what there is where the line is written: values, their dims, new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from shardplan import Model
from shardplan.core.mesh import Mesh
from shardplan.core.op import Op
from shardplan.core.ops import (
    Attention,
    Combine,
    Concat,
    CrossEntropy,
    Dispatch,
    Einsum,
    Elementwise,
    Expand,
    Gather,
    LayerNorm,
    ReduceDims,
    Repeat,
    Reshape,
    RmsNorm,
    Softmax,
    Split,
    TopK,
)
from shardplan.core.program import Program
from shardplan.core.program_builder import ProgramBuilder
from shardplan.core.step import Step
from shardplan.core.tensor import TensorType

ONE = Mesh()
Dims = tuple[str, ...]
NAMES = ("hidden", "ffn", "kv_heads", "ratio", "sequence", "wide")  # what a new dim may be called
ALONE = ("tanh(a)", "a / (1 + exp(-a))", "0.3 * a + 0.2", "exp(-a * a)", "maximum(a, 0.1 * a)")
PAIRS = ("a + b", "a - 0.5 * b", "a * tanh(b)", "maximum(a, b)", "a / (1 + b * b)", "where(a < b, a, b)")


class Line(NamedTuple):
    """What is written, and numbers that choose of what."""

    kind: str
    a: int
    b: int
    c: int


class Recipe(NamedTuple):
    """Sizes by name of a dim, the lines before, inside and behind loops of so many layers, and the loss."""

    sizes: Mapping[str, int]
    before: tuple[Line, ...]
    layers: tuple[int, ...]
    body: tuple[Line, ...]
    behind: tuple[Line, ...]
    loss: Line

    def cook(self, batch: int, **fields: Any) -> Model:
        """The model of a batch; `fields` are those of `Model.of`."""
        return _Kitchen({**self.sizes, "batch": batch}).model(self, fields)


def _letters(dims: Dims) -> str:
    return "".join({"batch": "b", "sequence": "s", "hidden": "h", "ffn": "f", "kv_heads": "g", "ratio": "r",
                    "wide": "w", "head": "d", "vocab": "v", "experts": "e"}[d] for d in dims)  # fmt: skip


class _Kitchen:
    """A program while it is written; `values` are those to choose from, with their dims."""

    def __init__(self, sizes: Mapping[str, int], stem: str = "") -> None:
        self.sizes, self.stem = sizes, stem
        self.builder = ProgramBuilder({})
        self.inputs: dict[str, Dims] = {}
        self.parameters: list[str] = []
        self.values: list[tuple[str, Dims]] = []
        self.looped: list[tuple[str, Dims]] = []

    def given(self, name: str, dims: Dims, dtype: str = "f64") -> str:
        self.builder.types[name] = TensorType(dtype, [self.sizes[d] for d in dims], (), ONE)
        self.inputs[name] = dims
        return name

    def parameter(self, dims: Dims) -> str:
        name = f"w{len(self.parameters)}"
        self.parameters.append(name)
        return self.given(name, dims)

    def put(self, op: Op, dims: Dims, *operands: str) -> None:
        self.values.append((self.builder(op, *operands), dims))

    def pick(self, number: int, legal: Callable[[Dims], bool] = bool) -> tuple[str, Dims] | None:
        """A value, of the latest first."""
        found = [v for v in reversed(self.values) if legal(v[1])]
        return found[number % len(found)] if found else None

    def line(self, line: Line) -> None:
        """Write a line, if there is what it needs."""
        found = self.pick(line.a, lambda dims: dims[-1:] not in ((), ("batch",)))
        if found is not None:
            getattr(self, f"_{line.kind}")(*found, line.b, line.c)

    def _new(self, dims: Dims, number: int) -> str:
        free = [n for n in NAMES if n not in dims]
        return free[number % len(free)]

    def _inner(self, dims: Dims, number: int) -> str:
        inner = [d for d in dims if d != "batch"]
        return inner[number % len(inner)]

    def _project(self, x: str, dims: Dims, b: int, c: int) -> None:
        """A product with a parameter, which has one dim of x and one or two new ones."""
        gone, new = self._inner(dims, b), [self._new(dims, c)]
        if c % 5 == 4 and len(dims) < 4:
            new.append(self._new((*dims, *new), b))
        w = self.parameter((gone, *new))
        kept = tuple(d for d in dims if d != gone)
        out = (*kept, *new)
        spec = f"{_letters(dims)},{_letters((gone, *new))}->{_letters(out)}"
        self.put(Einsum(spec), out, x, w)

    def _mix(self, x: str, dims: Dims, b: int, c: int) -> None:
        """A product of two values, summed over what they share, or not."""
        other = self.pick(b, lambda o: len({*dims, *o}) <= 5 and ("batch" in o) == ("batch" in dims))
        if other is None:
            return
        y, more = other
        shared = [d for d in dims if d in more and d != "batch"]
        gone = {shared[c % len(shared)]} if shared and c % 3 else set[str]()
        out = tuple(d for d in dict.fromkeys((*dims, *more)) if d not in gone)
        if 0 < len(out) <= 4:
            self.put(Einsum(f"{_letters(dims)},{_letters(more)}->{_letters(out)}"), out, x, y)

    def _each(self, x: str, dims: Dims, b: int, c: int) -> None:
        self.put(Elementwise(ALONE[b % len(ALONE)]), dims, x)

    def _both(self, x: str, dims: Dims, b: int, c: int) -> None:
        """Two values, one of which may have fewer dims; or one and a parameter of its last dims."""
        other = self.pick(b, lambda o: dims[-len(o) :] == o if o else False) if b % 3 else None
        if other is None or other[0] == x:
            last = dims[-1 - b % len(dims) :]
            other = (self.parameter(last), last) if "batch" not in last else None
        if other is not None:
            self.put(Elementwise(PAIRS[c % len(PAIRS)]), dims, x, other[0])

    def _norm(self, x: str, dims: Dims, b: int, c: int) -> None:
        w = self.parameter(dims[-1:])
        if c % 2:
            self.put(RmsNorm(1e-2), dims, x, w)
        else:
            self.put(LayerNorm(1e-2), dims, x, w, self.parameter(dims[-1:]))

    def _soft(self, x: str, dims: Dims, b: int, c: int) -> None:
        self.put(Softmax(dims.index(self._inner(dims, b))), dims, x)

    def _sum(self, x: str, dims: Dims, b: int, c: int) -> None:
        """A dim is reduced away; or what a dim has is taken relative to its sum, mean or largest."""
        d, how = dims.index(self._inner(dims, b)), ("sum", "mean", "max")[c % 3]
        if c % 2 and len(dims) > 1:
            self.put(ReduceDims((d,), how), (*dims[:d], *dims[d + 1 :]), x)
        else:
            self.put(Elementwise("a - 0.3 * b"), dims, x, self.builder(ReduceDims((d,), how, keep=True), x))

    def _spread(self, x: str, dims: Dims, b: int, c: int) -> None:
        """Along a new dim."""
        if len(dims) < 4:
            new, k = self._new(dims, c), 1 + b % len(dims)
            words = [*_letters(dims)]
            words.insert(k, f"{_letters((new,))}={self.sizes[new]}")
            out = (*dims[:k], new, *dims[k:])
            self.put(Expand(f"{' '.join(_letters(dims))} -> {' '.join(words)}"), out, x)

    def _turn(self, x: str, dims: Dims, b: int, c: int) -> None:
        """Its dims in another order, or a dim's parts in another one."""
        if c % 2:
            out = (dims[0], *dims[:0:-1])
            self.put(Einsum(f"{_letters(dims)}->{_letters(out)}"), out, x)
            return
        d = dims.index(self._inner(dims, b))
        n = self.builder.types[x].shape[d]
        if n > 1:
            k = 1 + b % (n - 1)
            parts = self.builder.write_step(Split(d, (k, n - k)), x)
            self.put(Concat(d), dims, *parts[::-1])

    def _attend(self, x: str, dims: Dims, b: int, c: int) -> None:
        """Attention, with query heads in groups, over what may be called the sequence."""
        found = self.pick(b, lambda o: len(o) == 3 and o[:2] == ("batch", "sequence"))
        if found is None:
            return
        x, (_, _, d) = found
        if d in ("kv_heads", "ratio"):
            return
        q, k, v = (self.parameter((d, *more, "head")) for more in (("kv_heads", "ratio"), ("kv_heads",), ("kv_heads",)))
        i = _letters((d,))
        q = self.builder(Einsum(f"bs{i},{i}grd->bsgrd"), x, q)
        k, v = (self.builder(Einsum(f"bs{i},{i}gd->bsgd"), x, w) for w in (k, v))
        y = self.builder(Attention(causal=bool(c % 2)), q, k, v)
        out = self.parameter(("kv_heads", "ratio", "head", d))
        self.put(Einsum(f"bsgrd,grd{i}->bs{i}"), ("batch", "sequence", d), y, out)

    def _route(self, x: str, dims: Dims, b: int, c: int) -> None:
        """The best of some experts, which have a product each, in slots of which there may be too few."""
        found = self.pick(b, lambda o: len(o) == 3 and o[:2] == ("batch", "sequence") and o[2] != "experts")
        if found is None:
            return
        x, (_, _, d) = found
        i, n = _letters((d,)), self.sizes["experts"]
        odds = self.builder(Einsum(f"bs{i},{i}e->bse"), x, self.parameter((d, "experts")))
        best, chosen = self.builder.write_step(TopK(min(n, 1 + c % 2)), odds)
        slots, _ = self.builder.write_step(Dispatch(n, 1 + b % 3), x, chosen)
        y = self.builder(Einsum(f"bec{i},e{i}->bec{i}"), slots, self.parameter(("experts", d)))
        y = self.builder(Combine(), y, chosen, self.builder(Softmax(2), best))
        self.values.append((y, found[1]))

    def _merge(self, x: str, dims: Dims, b: int, c: int) -> None:
        """Two dims as one, and back."""
        if len(dims) > 2:
            k = 1 + b % (len(dims) - 2)
            words = [*_letters(dims)]
            pair = words[k : k + 2]
            sizes = dict(zip(words, self.builder.types[x].shape, strict=True))
            one = " ".join([*words[:k], f"({' '.join(pair)})", *words[k + 2 :]])
            two = " ".join([*words[:k], f"({pair[0]} {pair[1]}={sizes[pair[1]]})", *words[k + 2 :]])
            y = self.builder(Reshape(f"{' '.join(words)} -> {one}"), x)
            y = self.builder(Elementwise(ALONE[c % len(ALONE)]), y)
            self.put(Reshape(f"{two} -> {' '.join(words)}"), dims, y)

    def _look(self, x: str, dims: Dims, b: int, c: int) -> None:
        """Rows of a table, in a loop of what is carried there."""
        ids = next((n for n, t in self.builder.types.items() if t.dtype == "i32" and n in self.inputs), None)
        if ids is None:
            return
        last = ("hidden", "ffn", "wide")[c % 3]
        self.put(Gather(), ("batch", "sequence", last), self.parameter(("vocab", last)), ids)

    def loop(self, layers: int, body: Sequence[Line], number: int, stem: str) -> None:
        """A repeat that carries a value, at times a second one, and reads another."""
        carried = [self.pick(number, lambda dims: "batch" in dims and len(dims) > 1)]
        carried += [self.pick(number // 2, lambda dims: "batch" in dims and len(dims) > 1)] if number % 3 == 0 else []
        other = self.pick(number // 2)
        assert other is not None  # there is an input at least
        inner = _Kitchen(self.sizes)
        inner.builder.types |= {"i": self.builder.types[other[0]]}
        inner.values = [("i", other[1])]
        before = [(f"x{k}", *one) for k, one in enumerate(carried) if one is not None]
        for name, x, dims in before:
            inner.builder.types[name] = self.builder.types[x]
            inner.values.append((name, dims))
        for line in body:
            inner.line(line)
        made: list[str] = []
        for name, _, dims in before:
            y, _ = inner.pick(0, lambda d, dims=dims: d == dims) or (name, dims)
            if y == name:
                y = inner.builder(Elementwise("a * b"), name, inner.parameter(dims[-1:]))
            made.append(inner.builder(Elementwise("0.5 * a + tanh(b)"), name, y))
        steps = [inner.builder.steps[k] for k in inner.builder.live(made)]
        used = {o for step in steps for o in step.operands}
        cut = [w for w in inner.parameters if w in used]
        inside = [*(name for name, *_ in before), "i", *cut]
        program = Program([(n, inner.builder.types[n]) for n in inside], steps, made)
        stacks: list[str] = []
        for w in cut:
            stacks.append(f"{stem}.{w}")
            t = inner.builder.types[w]
            self.builder.types[stacks[-1]] = TensorType(t.dtype, (layers, *t.shape), (), ONE)
            self.inputs[stacks[-1]] = ("layer", *inner.inputs[w])
            self.parameters.append(stacks[-1])
        op = Repeat(layers, program, len(before), len(stacks))
        out = self.builder.write_step(op, *(x for _, x, _ in before), other[0], *stacks)
        self.looped = [(y, dims) for y, (_, _, dims) in zip(out, before, strict=True)]
        self.values += self.looped

    def model(self, recipe: Recipe, fields: Mapping[str, Any]) -> Model:
        kind, a, b, _ = recipe.loss
        self.given("ids", ("batch", "sequence"), "i32")
        x = self.given("x", ("batch", "sequence", "hidden"))
        self.values.append((x, self.inputs[x]))
        self.values.append((self.builder(Elementwise("tanh(a)"), self.given("y", ("batch", "ffn"))), ("batch", "ffn")))
        for line in recipe.before:
            self.line(line)
        for k, layers in enumerate(recipe.layers):
            for line in recipe.behind if k else ():
                self.line(line)
            self.loop(layers, recipe.body, b, f"layers{k}")
        for line in recipe.behind:
            self.line(line)
        miss = self._misses(kind, a)
        loss = self.builder(ReduceDims(tuple(range(self.builder.types[miss].ndim)), "mean"), miss)
        steps = [self.builder.steps[k] for k in self.builder.live([loss])]
        steps = [Step(s.op, s.operands, ("loss",) if s.results == (loss,) else s.results, s.stopped) for s in steps]
        used = {o for s in steps for o in s.operands}
        inputs = [(n, self.builder.types[n]) for n in self.inputs if n in used]
        program = Program(inputs, steps, ("loss",))
        dims = {n: self.inputs[n] for n, _ in inputs}
        return Model.of(program, dims, [w for w in self.parameters if w in used], name="small", **fields)

    def _misses(self, kind: str, number: int) -> str:
        """Values whose mean over the batch, and all else, is the loss."""
        found = self.pick(number, lambda dims: dims[:1] == ("batch",) and len(dims) > 1)
        assert found is not None  # x at least
        x, dims = found
        if kind == "classes" and dims[:2] == ("batch", "sequence") and len(dims) == 3:
            i = _letters(dims[2:])
            odds = self.builder(Einsum(f"bs{i},{i}v->bsv"), x, self.parameter((dims[2], "vocab")))
            return self.builder(CrossEntropy(), odds, "ids")
        weight = self.parameter(dims[-1:])
        x = self.builder(Elementwise("a * b"), x, weight)
        if kind == "all":  # what loops made has a part, and the latest values
            latest = [v for v in self.values if v[1][:1] == ("batch",) and v[0] != found[0]][-2:]
            for y, more in dict.fromkeys((*(v for v in self.looped if v[1][:1] == ("batch",)), *latest)):
                rest = tuple(range(1, len(more)))
                y = self.builder(ReduceDims(rest, "mean", keep=False), y) if rest else y
                for k in range(1, len(dims)):
                    held = " ".join(_letters(dims[:k]))
                    d = dims[k]
                    y = self.builder(Expand(f"{held} -> {held} {_letters((d,))}={self.builder.types[x].shape[k]}"), y)
                x = self.builder(Elementwise("a + tanh(b)"), x, y)
        return self.builder(Elementwise("(a - 0.7) ** 2"), x)


KINDS = ("project", "project", "project", "mix", "each", "both", "both", "norm", "soft", "sum", "spread", "turn",
         "attend", "look", "route", "merge")  # fmt: skip
_number = st.integers(0, 11)
_lines = st.builds(Line, st.sampled_from(KINDS), _number, _number, _number)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Recipes with sizes of 1 to 7; every other one has a loop."""
    some = lambda *n: st.sampled_from(n)  # noqa: E731
    sizes = {name: draw(some(4, 3, 2, 5, 6, 1)) for name in (*NAMES, "head", "experts")} | {
        "vocab": draw(some(5, 4, 7))
    }
    before = draw(st.lists(_lines, max_size=4))
    body = draw(st.lists(_lines, min_size=1, max_size=4)) if draw(st.booleans()) else []
    behind = draw(st.lists(_lines, min_size=0 if body else 1, max_size=3))
    loss = Line(draw(some("all", "all", "classes")), draw(_number), draw(_number), 0)
    layers = draw(some((2,), (3,), (2, 1), (4,))) if body else ()
    return Recipe(sizes, tuple(before), layers, tuple(body), tuple(behind), loss)


@st.composite
def strategies(draw: st.DrawFn, recipe: Recipe) -> dict[str, Any]:
    """Fields of a `Strategy` of 2, 3, 4, 6 or 8 devices; all named kinds come."""
    some = lambda *n: draw(st.sampled_from(n))  # noqa: E731
    left, said = some(2, 4, 3, 6, 8), dict[str, Any]()
    axes = ["data", "tensor", "context", *(["pipeline"] if recipe.body else [])]
    for axis in draw(st.permutations(axes)):
        most = left if axis != "pipeline" else sum(recipe.layers)
        n = draw(st.sampled_from([k for k in range(1, most + 1) if left % k == 0][::-1]))
        said |= {axis: n} if n > 1 else {}
        left //= n
    said["data"] = said.get("data", 1) * left
    if said["data"] > 1:
        said |= some({}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"fsdp": True}, {"zero": 1, "bucket": 300.0})
        if said["data"] == 4 and "bucket" not in said and len(said) > 1 and draw(st.booleans()):
            said |= {"shard": 2} if "zero" in said or "fsdp" in said else {}
    if "tensor" in said:
        said |= some({}, {"sequence_parallel": True})
    if "context" in said:
        said |= some({}, {"context_kind": "gather"})
    said["microbatch"] = some(1, 1, 2)
    said["global_batch"] = said["data"] * said["microbatch"] * some(1, 2, 3) + some(0, 0, 1)
    if recipe.body:
        said |= some({}, {}, {"recompute": "full"}, {"recompute": ("elementwise",)})
    if "pipeline" in said:
        said |= some({}, {"schedule": "gpipe"})
        if said["pipeline"] == 2 and sum(recipe.layers) > 3:
            said |= some({}, {"interleave": 2, "schedule": "looped-bfs"})
    if said["data"] % 2 == 0 and "shard" not in said:
        said |= some({}, {"expert": 2})
    return said
