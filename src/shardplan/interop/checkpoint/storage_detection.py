"""How a checkpoint is stored, found in its files: its table by the tensors' names and shapes, and each one's dtype."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardplan.core.dtypes import itemsize, short_name
from shardplan.core.expression_tree import Binary, Name
from shardplan.errors import LayoutError, ParseError, line, near_text
from shardplan.interop.checkpoint.layouts import layout_weights
from shardplan.interop.checkpoint.optimizer_names import state_names, with_found_states
from shardplan.interop.checkpoint.sources import DISTRIBUTED, OpenCheckpoint, matches
from shardplan.movement.weights.arithmetic import evaluate_size, parse_size
from shardplan.movement.weights.frameworks import FUSED_LORA
from shardplan.movement.weights.sizing import TableSizes
from shardplan.movement.weights.state import ROUNDED, is_state, rounded_names, states_of
from shardplan.movement.weights.table import TableParameter, WeightTable, shipped_models, shipped_tables, table_files
from shardplan.movement.weights.towers import CONFIGS, add_tower, is_of_language_model, with_prefix
from shardplan.movement.weights.weights import Weights, make_weights

# What a checkpoint's names may have where a table's have something else: (of the table, of the checkpoint).
_PREFIXES = (
    ("", ""),
    ("", "transformer."),
    ("model.", "model.language_model."),
    ("", "language_model."),
    ("language_model.", ""),
    ("", "module."),
    ("", "model."),
)
_WHOLE = ("hf", "fsdp2", "hf5", "torchtitan", "megatron-dist", "megatron-stacked", "peft", "vllm", "sglang")
# What only a fused adapter of Megatron-Bridge has: rows of the other kind depend on degrees that no file says.
_FUSED_ADAPTER = ".linear_qkv.adapter.linear_in.weight"
_TAILS = re.compile(r"(?:-(?:fp8|mxfp4|mtp|ep|split))*\Z")
_HEAD = re.compile(
    r"(?:(?:fsdp2|megatron(?:-dist)?)-peft|hf5?|fsdp2|peft|torchtitan|megatron(?:-dist|-stacked)?|vllm|sglang)-"
)
_PLACE = re.compile(r"\\\{[A-Za-z_][A-Za-z0-9_]*(?:\\\.local)?\\\}")


class UnknownModel(LayoutError):
    """No shipped table has the tensors of a checkpoint."""


def framework_head(table: str) -> str:
    """Return what the name of a shipped table begins with: `megatron-dist` of `megatron-dist-llama`."""
    head = _HEAD.match(table)
    return "" if head is None else head.group().rstrip("-")


def model_and_switches(table: str) -> tuple[str, tuple[str, ...]]:
    """Return the model of a shipped table, and what else its name says.

    >>> model_and_switches("hf-deepseek-v3-fp8")
    ('deepseek-v3', ('fp8',))
    """
    head = _HEAD.match(table)
    rest = table[head.end() :] if head else table
    tails = _TAILS.search(rest)
    assert tails is not None
    return rest[: tails.start()], tuple(t for t in tails.group().split("-") if t in ("fp8", "mxfp4", "mtp"))


def find_weights(held: OpenCheckpoint, config: Mapping[str, Any], ignored: Sequence[str] = ()) -> Weights:
    """Return how a checkpoint is stored: the shipped table whose names and shapes are its own, in the files' dtypes.

    Sizes that the config does not have are those of the tensors; a padded vocabulary is as large as it is stored.

    Raises:
        UnknownModel: no table has such names.
        LayoutError: the one that has them does not have such shapes: it says which.
    """
    every = [n for n in held.first_tensors if not matches(n, ignored)]
    states = state_names(every)
    names = [n for n in every if n not in states]
    shapes = {n: tuple(held.first_tensors[n].shape) for n in names}
    failed: LayoutError | ParseError | None = None
    for table in _candidates(names, held, config):
        try:
            sizes = {**_inferred_sizes(table, shapes, config), **config}
            found = _on_devices(with_found_states(table, states.values()), sizes, held, shapes)
            held.side(found)
            held.check_names(found, ignored)
            return read_dtypes(found, held)
        except (LayoutError, ParseError) as error:
            failed = failed or error
    if failed is None:
        said = config.get("model_type")
        model = f"its model_type is {said}{near_text(said, shipped_models())}; " if said else ""
        raise UnknownModel(
            f"{line(held.path)}: no shipped table has such tensors ({', '.join(sorted(names)[:2])}, ..); {model}legal "
            f"are the models {', '.join(shipped_models())}, or --from with a table's path"
        )
    hint = (
        ""
        if not any(s in str(failed) for s in ("is not known", " is None where "))
        else ": of files without config.json, --config FILE or --set KEY=VALUE"
    )
    raise LayoutError(f"{line(failed)}{hint}") from None


def whole_weights(held: OpenCheckpoint, layouts: Path | None = None) -> Weights:
    """Return a plain checkpoint of any model as whole tensors, or as a file of layouts says; raises `LayoutError`."""
    if layouts is not None and len(held.places) > 1:
        raise LayoutError(f"{line(held.path)} is sharded; legal is a source that reshard wrote, or a plain checkpoint")
    return layout_weights(layouts, {n: (tuple(t.shape), t.dtype_name) for n, t in held.first_tensors.items()})


def read_dtypes(weights: Weights, held: OpenCheckpoint) -> Weights:
    """Return weights with every parameter in the dtype that its files have.

    Raises `LayoutError` where a parameter has one in one layer and another in the next.
    """
    found: dict[str, dict[str, str]] = {}
    for rank in weights.devices:
        place = weights.place(rank)
        for family in weights.families:
            if family.present[place]:
                names = [n for n in family.device_names(place) if n in held.places[place]]
                of = found.setdefault(family.entry.name, {})
                of |= {held.tensor(place, n).dtype_name: n for n in names}
    for name, dtypes in found.items():
        if len(dtypes) > 1:
            said = " and ".join(f"{n} {d}" for d, n in sorted(dtypes.items()))
            raise LayoutError(f"{line(held.path)}: {name} has several dtypes, {said}; legal is one for all its layers")
    return with_dtypes(weights, {name: next(iter(d)) for name, d in found.items() if d})


def follow_dtypes(target: Weights, source: Weights) -> Weights:
    """Return a target whose parameters keep the dtypes of what they hold: the wider one where it joins several."""
    of = {t: f.dtype for f in source.families for t in f.tensors}
    if rounded_names(target.table):
        of |= {t: s[ROUNDED] for t, s in states_of(source).items() if ROUNDED in s}
    fixed = {p.name for p in target.table.parameters if p.dtype}
    out: dict[str, str] = {}
    for family in target.families:
        dtypes = {of[t] for t in family.tensors if t in of and t not in dict(target.table.dtypes)}
        if dtypes and family.entry.name not in fixed:
            widest = max(dtypes, key=itemsize)
            out[family.entry.name] = (
                "f32" if len({d for d in dtypes if itemsize(d) == itemsize(widest)}) > 1 else widest
            )
    return with_dtypes(target, out)


def with_dtypes(weights: Weights, dtypes: Mapping[str, str]) -> Weights:
    """Return weights whose parameters have some dtypes, by the table's names; that of most elements is the side's."""
    sizes: Counter[str] = Counter()
    for family in weights.families:
        if (dtype := dtypes.get(family.entry.name)) and not all(map(is_state, family.tensors)):
            sizes[dtype] += sum(math.prod(weights.tensors[t].extents) for t in family.tensors)
    usual = max(sizes, key=lambda d: sizes[d], default=weights.dtype)
    declared = dict(weights.table.dtypes)
    parameters: list[TableParameter] = []
    for p in weights.table.parameters:
        own = short_name(p.dtype or next((declared[t] for t in p.form.tensors if t in declared), usual))
        new = dtypes.get(p.name, own)
        parameters.append(p if new == own else replace(p, dtype=new))
    table = replace(weights.table, parameters=tuple(parameters))
    return make_weights(table, dict(weights.config), dict(weights.given), weights.devices, usual)


def _candidates(names: Sequence[str], held: OpenCheckpoint, config: Mapping[str, Any]) -> Iterator[WeightTable]:
    """Yield the tables that have every name, those of the config's model first."""
    heads = ("vllm", "sglang") if len(held.places) > 1 else _WHOLE
    if any(n.endswith(_FUSED_ADAPTER) for n in names):
        heads = (*heads, "megatron-dist-peft")
    model = str(config.get("model_type")).replace("_", "-")
    models = tuple(
        shipped_models()
    )  # of those whose tensors are alike, the one that a file is named after, or the first
    seeing, found = any(isinstance(config.get(key), Mapping) for key in CONFIGS), held.first_tensors
    known: list[tuple[bool, bool, int, bool, int, str]] = []
    for name in shipped_tables():
        own, _ = model_and_switches(name)
        head = name[: name.rindex(own)].rstrip("-")
        if head in heads:
            sharded = (head == "fsdp2") != (held.form == DISTRIBUTED)
            place = models.index(own) if own in models else 0
            known.append((own != model, sharded, heads.index(head), name not in table_files(), place, name))
    for *_, name in sorted(known):
        table = _read_table(name)
        pattern = _pattern_of(tuple(p.name for p in table.parameters))
        for old, new in _PREFIXES:
            others = [n for n in names if not _own_name(n, old, new, pattern) and not matches(n, table.recomputed)]
            moved = with_prefix(table, old, new)
            if not others:
                yield moved
            elif (
                seeing
                and _has_embedding(moved, new, names)
                and not any(is_of_language_model(n, moved, new) for n in others)
            ):
                yield add_tower(moved, {n: (tuple(found[n].shape), found[n].dtype_name) for n in others})


def _has_embedding(table: WeightTable, prefix: str, names: Sequence[str]) -> bool:
    """Whether the embedding is there, under the prefix: a tower is beside a language model, and not in place of one."""
    own = (p.name for p in table.parameters if "embed" in p.form.tensors)
    return any(name.startswith(prefix) and name in names for name in own)


def _own_name(name: str, old: str, new: str, pattern: re.Pattern[str]) -> bool:
    """Whether a checkpoint's name is one of a table, whose `old` prefix is `new` there."""
    under = name.startswith(new) and pattern.fullmatch(old + name.removeprefix(new))
    return bool(under or (old and not name.startswith(old) and pattern.fullmatch(name)))


@lru_cache(maxsize=512)
def _read_table(name: str) -> WeightTable:
    return WeightTable.read(name)


@lru_cache(maxsize=256)
def _pattern_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """What all names of a table match; tables of one family share them."""
    return re.compile("|".join(_PLACE.sub(r"\\d+", re.escape(name)) for name in dict.fromkeys(names)))


def _on_devices(
    table: WeightTable, sizes: Mapping[str, Any], held: OpenCheckpoint, shapes: Mapping[str, tuple[int, ...]]
) -> Weights:
    """The weights of a table for as many devices as a checkpoint has places, with the padding that it has."""
    degrees: dict[str, Any] = {"tensor": len(held.places)} if len(held.places) > 1 else {}
    rows = next((shapes[p.name][0] for p in table.parameters if "embed" in p.form.tensors and p.name in shapes), 0)
    size = sizes.get("vocab_size")
    if "divisible" in dict(table.degrees) and isinstance(size, int) and -(-size // 128) * 128 != rows >= size:
        degrees["divisible"] = rows  # whatever it was padded to
    return make_weights(table, sizes, degrees, None, "f32")


def _inferred_sizes(
    table: WeightTable, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what of a config the shapes of whole tensors say: each dim of which one atom alone is not known."""
    features = TableSizes(table, config, {})
    known: dict[str, int] = {}
    counts: dict[str, set[int]] = {}
    dims: list[tuple[list[str], int]] = []
    atoms = dict(table.atoms)
    for p in table.parameters:
        if not features.has(p):
            continue
        holes = re.findall(r"\{([A-Za-z_]\w*)\}", p.name)
        pattern = re.compile(_PLACE.sub(r"(\\d+)", re.escape(p.name)))
        for name, shape in shapes.items():
            if (hit := pattern.fullmatch(name)) is None:
                continue
            for hole, number in zip(holes, hit.groups(), strict=False):
                counts.setdefault(hole, set()).add(int(number))
            texts = str(p.form).partition(" = ")[2].split(", ")
            if len(p.form.tensors) == 1 and len(texts) == len(shape):
                plain = (re.sub(r"@[\w.*~]+", "", t).strip("() ") for t in texts)
                dims += [(t.split(), n) for t, n in zip(plain, shape, strict=True) if re.fullmatch(r"[\w ]+", t)]
    known |= {hole: max(found) + 1 for hole, found in counts.items()}
    for _ in range(len(atoms)):
        for own, n in dims:
            unknown = [a for a in own if a not in known and a in atoms]
            rest = 1
            for a in own:
                rest *= known.get(a, 1)
            if len(unknown) == 1 and rest and n % rest == 0:
                known[unknown[0]] = n // rest
    out: dict[str, Any] = {}
    for atom, size in known.items():
        if atom in atoms:
            _solve_key(atoms[atom], size, out)
    if any(p.unless == "tie_word_embeddings" for p in table.parameters):
        untied = {p.name for p in table.parameters if p.unless == "tie_word_embeddings"}
        out["tie_word_embeddings"] = not untied & shapes.keys()
    if any(n.endswith(_FUSED_ADAPTER) for n in shapes):
        out[FUSED_LORA] = True
    return out


def _solve_key(text: str, size: int, out: dict[str, Any]) -> None:
    """Put the key of a config whose value an atom's text and size say: a name, the first of several, or a quotient."""
    tree = first = parse_size(text)
    while isinstance(first, Binary) and first.symbol in ("or", "and"):
        first = first.left
    if isinstance(first, Name):
        out.setdefault(first.name, size)
    elif isinstance(tree, Binary) and tree.symbol == "/" and isinstance(tree.left, Name):
        key = tree.left.name
        below = evaluate_size(tree.right, text, {k: v for k, v in out.items() if k != key}.get)
        if isinstance(below, int):
            out.setdefault(key, size * below)
