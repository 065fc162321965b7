"""Towers: what a model that also sees or hears has beside its language model, passed through as it is.

The language model of such a checkpoint stands under a prefix, of three kinds (transformers 5.24 writes all of them):
`model.language_model.*` beside `model.visual.*` (Qwen3-VL), `language_model.model.*` beside `vision_tower.*` (Gemma 3,
Llava, Mistral 3), and `model.*` beside `visual.*` (Qwen2.5-VL). Servers and Megatron have it under `language_model.`
(vLLM model_executor/models/qwen2_5_vl.py, gemma3_mm.py, hf_to_vllm_mapper; Megatron-LM models/multimodal). A tower's
tensors keep their names and are whole on every device of the first stage; no framework's cut of them is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardplan.errors import LayoutError, excerpt
from shardplan.movement.weights.form import StoredForm
from shardplan.movement.weights.table import TableParameter, WeightTable

Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Whole shape and dtype by name."""
CONFIGS = ("vision_config", "audio_config")  # one of which the config of a model with a tower has
_LANGUAGE = "language_model."
_OWN = "tower_"  # what logical tensors of a tower are called by
_NUMBER = re.compile(r"(.*?\.)(\d+)(\..*)\Z")
_TOWERS = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower")  # beside `model.layers`
_WITHOUT = ("torchtitan", "peft", "fsdp2-peft", "megatron-peft", "megatron-dist-peft")  # frameworks that have no tower


def with_prefix(table: WeightTable, old: str, new: str) -> WeightTable:
    """Return a table with another prefix for the names that have one."""
    moved = (replace(p, name=new + p.name.removeprefix(old)) if p.name.startswith(old) else p for p in table.parameters)
    return table if old == new else replace(table, parameters=tuple(moved))


def is_of_language_model(name: str, table: WeightTable, prefix: str) -> bool:
    """Whether a name lies where a table's do, that have a prefix: under it, or under another first word of theirs.

    >>> table = with_prefix(WeightTable.read("hf-llama"), "model.", "model.language_model.")
    >>> [is_of_language_model(n, table, "model.language_model.") for n in ("lm_head.bias", "model.visual.pos_embed")]
    [True, False]
    """
    if prefix and name.startswith(prefix):
        return True
    first, _, rest = name.partition(".")
    words = {p.name.partition(".")[0] for p in table.parameters if not (prefix and p.name.startswith(prefix))}
    return first in words and rest.partition(".")[0] not in _TOWERS


def add_tower(table: WeightTable, tensors: Tensors) -> WeightTable:
    """Return a table with tensors of a tower beside its own, whole everywhere; names that differ in a number are one.

    Raises `LayoutError` for a name with braces.

    >>> tower = {f"visual.blocks.{n}.norm.weight": ((4,), "f32") for n in range(2)} | {"visual.pos": ((9, 4), "f32")}
    >>> [(p.name, str(p.form)) for p in add_tower(WeightTable.read("vllm-qwen2"), tower).parameters[-2:]]
    [('visual.blocks.{each_2}.norm.weight', 'tower_0 = w0_4'), ('visual.pos', 'tower_1 = w0_9, w1_4')]
    """
    atoms, holes, logical = dict(table.atoms), dict(table.holes), dict(table.tensors)
    parameters: list[TableParameter] = []
    for pattern, count, shape, dtype in _patterns(tensors):
        name, dims = f"{_OWN}{len(parameters)}", [f"w{d}_{n}" for d, n in enumerate(shape)]
        atoms |= {f"w{d}_{n}": str(n) for d, n in enumerate(shape)}
        hole = f"each_{count}"
        if count:
            atoms[hole], holes[hole] = str(count), hole
        logical[name] = ", ".join([*([hole] if count else []), *(dims or ["1"])])
        form = StoredForm.parse(f"{name} = {', '.join(dims)}")
        parameters.append(TableParameter(pattern.replace("*", f"{{{hole}}}"), form, dtype=dtype))
    return _with_entries(table, atoms, holes, logical, parameters)


def _patterns(tensors: Tensors) -> list[tuple[str, int, tuple[int, ...], str]]:
    """Name, with * for a number from 0 to below the count, count, shape and dtype; a count of 0 is one name."""
    alike: dict[tuple[str, tuple[int, ...], str], dict[int, str]] = {}
    for name, (shape, dtype) in tensors.items():
        if {"{", "}", "*"} & set(name):
            raise LayoutError(f"tensor {excerpt(name)}: a tower's name with braces or *; legal are names without")
        match = _NUMBER.match(name)
        pattern, number = (f"{match.group(1)}*{match.group(3)}", int(match.group(2))) if match else (name, 0)
        alike.setdefault((pattern, shape, dtype), {})[number] = name
    out: list[tuple[str, int, tuple[int, ...], str]] = []
    for (pattern, shape, dtype), names in alike.items():
        whole = "*" in pattern and sorted(names) == list(range(len(names)))
        whole = whole and all(name == pattern.replace("*", str(number)) for number, name in names.items())
        out += [(pattern, len(names), shape, dtype)] if whole else [(n, 0, shape, dtype) for n in names.values()]
    return out


def _with_entries(
    table: WeightTable,
    atoms: Mapping[str, str],
    holes: Mapping[str, str],
    logical: Mapping[str, str],
    entries: Iterable[TableParameter],
) -> WeightTable:
    """A table with more entries, on the first stage where it has stages."""
    staged = "pipeline" in dict(table.meshes)[""]
    more = tuple(replace(p, on=(("pipeline", "first"),) if staged else ()) for p in entries)
    return replace(
        table,
        atoms=tuple(atoms.items()),
        holes=tuple(holes.items()),
        tensors=tuple(logical.items()),
        parameters=table.parameters + more,
    )


def tower_entries(table: WeightTable) -> tuple[TableParameter, ...]:
    """Return the parameters of a tower that a table has."""
    return tuple(p for p in table.parameters if p.form.tensors[0].startswith(_OWN))


def pass_tower(source: WeightTable, target: WeightTable, head: str) -> WeightTable:
    """Return a target's table with the source's tower, and its language model where the framework has it.

    Args:
        source: the table of a checkpoint.
        target: a shipped table.
        head: the framework as tables are called: `vllm` of `vllm-llama`.
    """
    entries = tower_entries(source)
    if not entries or head in _WITHOUT:
        return target
    needed = {t for p in entries for t in p.form.tensors}
    logical = {name: text for name, text in source.tensors if name in needed}
    used = {a for text in logical.values() for a in text.split(", ")}
    return _with_entries(
        with_prefix(target, *_prefix_of(entries, target, head)),
        dict(target.atoms) | {a: text for a, text in source.atoms if a in used},
        dict(target.holes) | {a: text for a, text in source.holes if a in used},
        dict(target.tensors) | logical,
        (replace(p, dtype="") for p in entries),
    )


def _prefix_of(entries: Iterable[TableParameter], target: WeightTable, head: str) -> tuple[str, str]:
    """What a framework's names of the language model begin with, beside a tower: (that of a table, in its place)."""
    names = [p.name for p in entries]
    inside = any(n.startswith("model.") for n in names)
    qwen = any(n.startswith(("visual.", "model.visual.")) for n in names)
    if any(p.name.startswith(_LANGUAGE) for p in target.parameters) or (head == "sglang" and qwen):
        return "", ""
    if head.startswith(("vllm", "sglang", "megatron")):
        return "", _LANGUAGE
    return ("model.", f"model.{_LANGUAGE}") if inside else ("", "") if qwen else ("", _LANGUAGE)
