"""`Layouts`: text that parses back, what its tables say of a value, and what `partition` refuses of them."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.core.layout import Layout
from shardplan.core.mesh import Mesh
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ParseError
from shardplan.strategy import Model
from shardplan.strategy.partition.partition import partition
from shardplan.strategy.partition.tables import FREE, Layouts, TableLine
from shardplan.strategy.strategy import Strategy
from strategies import rngs

DIMS, AXES = ("batch", "sequence", "ffn", "kv_heads", "d0"), ("data", "tensor", "context", "group")
LLAMA = {
    "layers": 2,
    "hidden": 8,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 6,
    "vocab": 10,
    "seq": 4,
    "batch": 4,
    "dtype": "f64",
}


def llama(**others: Any) -> Model:
    return Model.load("llama3-8b", **(LLAMA | others))


def mlp(**others: Any) -> Model:
    return Model.load("mlp-xs", **({"layers": 2, "hidden": 4, "batch": 4} | others))


# --- text

axes = st.lists(st.sampled_from(AXES), min_size=1, max_size=3, unique=True).map(tuple)
patterns = st.lists(
    st.sampled_from(("tokens", "layers.*", "*.q", "gradient.layers.[kv]", "w?")), min_size=1, max_size=3, unique=True
)
lines = st.builds(
    TableLine,
    patterns.map(tuple),
    st.lists(st.tuples(st.sampled_from((*DIMS, FREE)), axes), max_size=3).map(tuple),
    st.lists(st.sampled_from(AXES), max_size=2, unique=True).map(tuple),
)
groups = st.lists(st.lists(st.sampled_from((*DIMS, FREE)), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
layouts = st.builds(
    Layouts,
    st.lists(st.tuples(st.sampled_from(AXES), groups), max_size=3).map(tuple),
    st.lists(lines, max_size=3).map(tuple),
    st.lists(lines, max_size=3).map(tuple),
)


@given(layouts)
@settings(max_examples=200)
def test_the_text_parses_back(found: Layouts) -> None:
    assert Layouts.parse(str(found)) == found


@given(layouts, rngs())
@settings(max_examples=50)
def test_blanks_and_comments_say_nothing(found: Layouts, rng: random.Random) -> None:
    pad = lambda: " " * rng.randint(0, 2)  # noqa: E731
    text = re.sub(r"(?<=\()|(?=\))|(?=[,:>])|(?<=[,:>])", lambda _: pad(), str(found))
    assert Layouts.parse("\n".join(f"{pad()}{line}{pad()}# {line}\n" for line in text.splitlines())) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tokens: batch@data",
            "line 1 of layouts, 'tokens: batch@data'; legal are serve, stored or held, and below it lines",
        ),
        (
            "stored\n\n  tokens",
            "line 3 of layouts, 'tokens'; legal are serve, stored or held, and below it lines such as",
        ),
        ("held\n  q:  # nothing", "line 2 of layouts, 'q:  # nothing'; legal are serve, stored or held"),
        ("stores\n  q: whole", "line 1 of layouts, 'stores'; legal are serve, stored or held"),
        (
            "serve\n  data: batch > > free",
            "serve of data: 'batch > > free'; legal are dims such as '[kv_heads, ffn] > sequence'",
        ),
        ("serve\n  data: batch sequence", "serve of data: 'batch sequence'; legal are dims"),
        ("serve\n  data: [batch", "serve of data: '[batch'; legal are dims"),
        ("serve\n  data: [[batch]", "serve of data: '[[batch]'; legal are dims"),
        ("serve\n  data: [batch, 0]", "serve of data: '[batch, 0]'; legal are dims"),
        ("stored\n  q: batch", "q: 'batch'; legal are 'whole', or dims such as 'batch@data, free@(a,b), {+data}'"),
        ("stored\n  q: batch@data whole", "q: 'batch@data whole'; legal are 'whole', or dims"),
        ("held\n  q: {data}", "q: '{data}'; legal are 'whole', or dims"),
        ("held\n  q: {+data +tensor}", "q: '{+data +tensor}'; legal are names of axes such as 'free@(a,b), {+a,+b}'"),
        ("held\n  q: ffn@(a b)", "q: 'ffn@(a b)'; legal are names of axes"),
    ],
)
def test_what_is_no_table_is_refused(text: str, message: str) -> None:
    with pytest.raises(ParseError) as error:
        Layouts.parse(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


# --- what the tables say

MESH = Mesh({"data": 2, "context": 3, "tensor": 2})


def lies(line: str, dims: str, shape: tuple[int, ...], held: str = "") -> str:
    """How a value of these dims and this shape is stored, where the tables have one line of each."""
    tables = Layouts.parse(f"stored\n  w: {line}\nheld\n  w: {held or 'whole'}")
    t = TensorType("f32", shape, (), Mesh({"one": 1}))
    mine = tables.held_layout("w", dims.split(), MESH)
    return str(tables.stored_type("w", dims.split(), t, MESH, mine).layout)


def test_the_first_line_that_matches_counts() -> None:
    tables = Layouts.parse("held\n  layers.q, *.k: ffn@tensor\n  layers.*: ffn@data\n  *: whole")
    found = {n: str(tables.held_layout(n, ("ffn",), MESH)) for n in ("layers.q", "x.k", "layers.up", "q")}
    assert found == {"layers.q": "[@tensor]", "x.k": "[@tensor]", "layers.up": "[@data]", "q": "[_]"}


def test_a_line_says_dims_that_the_value_has() -> None:
    assert lies("batch@data, ffn@(context,tensor), vocab@tensor", "batch ffn", (4, 7)) == "[@data, @(context,tensor)]"
    assert lies("batch@data, {+context,+tensor}", "batch ffn", (4, 7)) == "[@data, _]{+context,+tensor}"


def test_stored_refines_held() -> None:
    assert lies("whole", "a b", (4, 4), "b@tensor") == "[_, @tensor]"
    assert lies("b@(tensor,data)", "a b", (4, 4), "b@tensor") == "[_, @(tensor,data)]"
    assert lies("a@context", "a b", (4, 4), "b@tensor") == "[@context, @tensor]"
    assert lies("{+data,+tensor}", "a b", (4, 4), "b@tensor") == "[_, @tensor]{+data}"  # no axis twice


@pytest.mark.parametrize(
    ("line", "dims", "shape", "held", "layout"),
    [
        ("free@data", "a b", (3, 4), "", "[_, @data]"),  # the first that is divided, not the first
        ("free@data", "a b", (4, 8), "", "[@data, _]"),  # nor the largest
        ("free@(data,context)", "a b c", (4, 9, 12), "", "[_, _, @(data,context)]"),  # all axes together
        ("free@data", "a b", (6, 6), "a@tensor", "[@tensor, @data]"),  # 6 is not divided by 2 x 2
        ("free@data", "a b", (4, 6), "a@tensor", "[@(tensor,data), _]"),  # minor to what is held
        ("free@data", "a b c", (3, 7, 5), "", "[_, @data, _]"),  # none: the largest
        ("free@data", "a b c", (3, 7, 7), "", "[_, @data, _]"),  # of equal ones the first
        ("free@data", "layer a", (4, 3), "", "[_, @data]"),  # rows are never dealt out
        ("free@data", "a b", (1, 3), "", "[_, @data]"),
        ("free@data", "a", (1,), "", "[_]"),  # one is not dealt out
        ("free@data", "", (), "", "[]"),
    ],
)
def test_free_is_the_first_dim_that_is_divided(
    line: str, dims: str, shape: tuple[int, ...], held: str, layout: str
) -> None:
    assert lies(line, dims, shape, held) == layout


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.sampled_from(("data", "context", "(data,context)")))
def test_free_leaves_no_device_with_less_where_it_can(shape: list[int], over: str) -> None:
    dims = [f"d{k}" for k in range(len(shape))]
    t = TensorType("f32", shape, (), Mesh({"one": 1}))
    tables = Layouts.parse(f"stored\n  w: free@{over}")
    found = tables.stored_type("w", dims, t, MESH, Layout(((),) * len(shape)))
    degree = math.prod(MESH.span(a).size for d in found.layout.dims for a in d)
    assert degree == (1 if max(shape) == 1 else {"data": 2, "context": 3}.get(over, 6))
    if any(n % degree == 0 for n in shape if n > 1):
        assert found.local_bytes() * degree == t.local_bytes()


# --- what a model and a mesh admit

STRATEGIES = {
    "zero": Strategy(data=2, tensor=2, zero=3),
    "expert": Strategy(data=4, expert=2, zero=1),
    "fsdp": Strategy(data=2, context=2, tensor=4, fsdp=True, sequence_parallel=True),
}


@pytest.mark.parametrize("family", [llama, mlp])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "how", [{"training": False}, {"optimizer": None}, {"optimizer": "sgd"}, {"optimizer": "adamw"}]
)
def test_a_strategy_says_nothing_of_what_a_model_does_not_have(family: Any, name: str, how: dict[str, Any]) -> None:
    model, strategy = family(**how), STRATEGIES[name]
    found = strategy.layouts(model)
    gradients = {f"gradient.{w}": model.dims[w] for w in model.gradients}
    held = {w: model.dims[w] for w in model.parameters}
    served = {dim for _, every in found.serve for group in every for dim in group}
    found.check(dict(model.dims) | gradients, held, served, strategy.mesh(model).axes)
    assert Layouts.parse(str(found)) == found


def refused(model: Model, old: str, new: str) -> str:
    """What `partition` says of a strategy's tables with a piece of text changed."""
    strategy = Strategy(data=2, tensor=2, zero=1)
    text = str(strategy.layouts(model))
    assert text.count(old) == 1, text
    with pytest.raises(LayoutError) as error:
        partition(model, strategy, layouts=text.replace(old, new))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "held\n",
            "held\n  layers.w: whole\n",
            "held, layers.w: whole: nothing is called 'layers.w'; legal are embed, ",
        ),
        (
            "held\n",
            "held\n  head, tokens: whole\n",
            "held, head, tokens: whole: nothing is called 'tokens'; legal are embed, ",
        ),
        (
            "stored\n",
            "stored\n  gradient.q: whole\n",
            "stored, gradient.q: whole: nothing is called 'gradient.q'; legal are ",
        ),
        (
            "held\n",
            "held\n  head: ffn@tensor\n",
            "held, head: ffn@tensor: there is no dim 'ffn'; legal are vocab, hidden",
        ),
        (
            "held\n",
            "held\n  head: free@tensor\n",
            "held, head: free@tensor: there is no dim 'free'; legal are vocab, hidden",
        ),
        (
            "held\n",
            "held\n  layers.q: layer@tensor\n",
            "held, layers.q: layer@tensor: there is no dim 'layer'; legal are hidden, ",
        ),
        (
            "held\n",
            "held\n  head: vocab@(tensor,pod)\n",
            "held, head: vocab@(tensor,pod): there is no axis 'pod'; legal are data, tensor",
        ),
        (
            "stored\n",
            "stored\n  tokens: {+pod}\n",
            "stored, tokens: {+pod}: there is no axis 'pod'; legal are data, tensor",
        ),
        ("serve\n", "serve\n  pod: batch\n", "serve, pod: batch: there is no axis 'pod'; legal are data, tensor"),
        ("serve\n", "serve\n  data: sequence\n", "serve, data: batch > free: a second line of data; legal is one"),
        (
            "vocab]",
            "vocabulary]",
            "serve, tensor: [kv_heads, ffn, vocabulary]: there is no dim 'vocabulary'; legal are ",
        ),
    ],
)
def test_nothing_that_tables_say_is_dropped(old: str, new: str, message: str) -> None:
    assert refused(llama(), old, new).startswith(message)


def test_dims_that_a_strategy_serves_are_legal_in_any_model() -> None:
    strategy = Strategy(data=2, tensor=2)
    assert "vocab" in str(strategy.layouts(mlp()))
    partition(mlp(), strategy, layouts=str(strategy.layouts(mlp())))
    assert refused(mlp(), "vocab", "experts").startswith("serve, tensor: [kv_heads, ffn, experts]: there is no dim")
