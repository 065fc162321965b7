"""Frameworks and models by the words that users know: which shipped table a word, a config and degrees mean.

A word is a framework, as in `vllm,tp=8`. The model is the config's `model_type`; what a checkpoint shows (fp8 blocks,
multi-token layers, stacked layers) or a switch beside the degrees says which of its tables it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shardplan.errors import LayoutError, ParseError, excerpt, line, near_text
from shardplan.movement.weights.cuts import UnevenCut

FRAMEWORKS = ("hf", "vllm", "sglang", "megatron", "torchtitan", "fsdp2", "dcp", "peft")
SWITCHES = ("fp8", "mxfp4", "mtp", "stacked", "split", "fused")
FUSED_LORA = "fused_lora"  # the field of a config that says of an adapter that q, k and v, gate and up, have one A
_SPELLINGS = {
    "tp": ("tensor",), "pp": ("pipeline",), "dp": ("data", "replica"), "ep": ("expert", "ep"), "etp": ("etp",),
    "vpp": ("chunks",), "tensor_parallel_size": ("tensor",), "pipeline_parallel_size": ("pipeline",),
    "data_parallel_size": ("data", "replica"), "expert_parallel_size": ("expert", "ep"),
}  # fmt: skip
# A word's heads, in memory and on disk; the first of which a model has a table is meant.
_HEADS = {
    "hf": (("hf5", "hf"), ("hf", "hf5")),
    "vllm": (("vllm",), ("vllm",)),
    "sglang": (("sglang",), ("sglang",)),
    "megatron": (("megatron",), ("megatron-dist",)),
    "torchtitan": (("torchtitan",), ("torchtitan",)),
    "fsdp2": (("fsdp2",), ("fsdp2",)),
    "dcp": (("fsdp2", "hf5", "hf"), ("fsdp2", "hf5", "hf")),
    "peft": (("fsdp2-peft",), ("peft",)),
}
# The same of adapters: servers read peft's files.
_ADAPTERS = {
    **dict.fromkeys(("hf", "vllm", "sglang", "peft"), (("fsdp2-peft",), ("peft",))),
    **dict.fromkeys(("fsdp2", "dcp"), (("fsdp2-peft",), ("fsdp2-peft",))),
    "megatron": (("megatron-peft",), ("megatron-dist-peft",)),
}
_FORMS = {"vllm": "parts", "sglang": "parts", "megatron": "megatron", "hf": "plain", "peft": "plain"}
_COMMA = re.compile(r",(?![^\[]*\])")  # none within brackets
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(.*?)\s*\Z")
_SPAN = re.compile(r"(\d+):(\d+)\Z")
_MOST_TRIED = 512  # degrees on each side of one that does not fit


@dataclass(frozen=True, slots=True)
class SideRequest:
    """A side as it is asked for: a framework's word, or a table's name or path; degrees; switches.

    >>> SideRequest.parse("megatron,tp=2,stages=[2,1],stacked")
    SideRequest(name='megatron', degrees={'tp': 2, 'stages': [2, 1]}, switches=('stacked',))
    """

    name: str
    degrees: dict[str, Any]
    switches: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> SideRequest:
        """Read a name, and degrees with commas between; raises `ParseError`."""
        name, *rest = _COMMA.split(text.strip())
        switches = tuple(part.strip() for part in rest if part.strip() in SWITCHES)
        degrees = dict(_parse_degree(part) for part in rest if part.strip() not in SWITCHES)
        return SideRequest(name.strip(), degrees, switches)

    @property
    def is_word(self) -> bool:
        """Whether the name is that of a framework."""
        return self.name in FRAMEWORKS

    @property
    def form(self) -> str:
        """The form in which the framework's own loader takes a checkpoint; `auto` for a table's name."""
        return _FORMS.get(self.name, "distributed") if self.is_word else "auto"


def _parse_degree(part: str) -> tuple[str, Any]:
    legal = f"legal is a degree, as tp=2, stages=[2,1] or devices=8:16, or one of {', '.join(SWITCHES)}"
    found = _KEY.match(part)
    if found is None:
        raise ParseError(f"{part!r}; {legal}")
    name, value = found.groups()
    if span := _SPAN.match(value):
        return name, range(int(span.group(1)), int(span.group(2)))
    if value.isdigit():
        return name, int(value)
    numbers = value[1:-1].split(",") if value.startswith("[") and value.endswith("]") else []
    if not numbers or not all(n.strip().isdigit() for n in numbers):
        raise ParseError(f"{part!r}; {legal}")
    return name, [int(n) for n in numbers]


def model_of(config: Mapping[str, Any], models: Iterable[str]) -> str:
    """Return the model of a config, as tables are called; raises `LayoutError`, which says the nearest.

    >>> model_of({"model_type": "qwen3_moe"}, ["llama", "qwen3-moe"])
    'qwen3-moe'
    """
    said, known = config.get("model_type"), tuple(models)
    if isinstance(said, str) and (name := said.replace("_", "-")) in known:
        return name
    raise LayoutError(
        f"model_type = {excerpt(said)}: no table ships for it{near_text(said, known)}; legal are "
        f"{', '.join(known)}, or the path of a table"
    )


def table_name(
    word: str,
    model: str,
    shipped: Iterable[str],
    degrees: Mapping[str, Any],
    switches: Iterable[str] = (),
    *,
    disk: bool = False,
    adapter: bool = False,
) -> str:
    """Return the name of the table that a framework's word means for a model.

    Args:
        word: one of `FRAMEWORKS`.
        model: as tables are called: `qwen3-moe`.
        shipped: the names of tables that there are.
        degrees: those that were given: `ep` above 1 means a table of expert parallelism.
        switches: some of `SWITCHES`.
        disk: whether a checkpoint is meant, and not a live model.
        adapter: whether a low-rank adapter is meant, and not the model.

    Raises:
        LayoutError: there is no such table; it names the frameworks, or the switches, that there are.
    """
    known, said = set(shipped), set(switches)
    by_word = {"torchtitan": ((), ()), **_ADAPTERS} if adapter else _HEADS
    heads = by_word[word][disk]
    if word == "megatron" and "stacked" in said:
        heads = ("megatron-stacked",)
    tail = "".join(f"-{s}" for s in ("fp8", "mxfp4", "mtp") if s in said)
    if word == "torchtitan" and "fused" not in said and (disk or "split" in said):
        tail += "-split"  # as its checkpoints are called either way
    parallel = max((n for d in ("ep", "expert_parallel_size") if isinstance(n := degrees.get(d), int)), default=1)
    for head in heads:
        name = f"{head}-{model}{tail}"
        if name in known:
            return f"{name}-ep" if parallel > 1 and f"{name}-ep" in known else name
    having = [w for w in FRAMEWORKS if any(f"{h}-{model}{tail}" in known for h in by_word[w][disk])]
    raise LayoutError(
        f"{word} of {model}{f' with {chr(44).join(sorted(said))}' if said else ''}: no table ships for it; legal are "
        f"{', '.join(having) or 'other switches'} of this model, or the path of a table"
    )


def spell_degrees(given: Mapping[str, Any], legal: Iterable[str]) -> dict[str, Any]:
    """Return degrees by a table's own names: `tp` is `tensor`, `dp` is `data`, or `replica` where there is no `data`.

    >>> spell_degrees({"tp": 8, "dp": 2}, ["tensor", "replica"])
    {'tensor': 8, 'replica': 2}
    """
    names = tuple(legal)
    out: dict[str, Any] = {}
    for name, value in given.items():
        own = name if name in names else next((n for n in _SPELLINGS.get(name, ()) if n in names), name)
        if own in out:
            raise LayoutError(f"{own} is given twice, once as {name}; legal is once")
        out[own] = value
    return out


def check_expert_degree(table: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return degrees without `ep`, which follows from the others; raises `LayoutError` where it is said otherwise.

    It is tp x dp in a table `...-ep`, which cuts experts over data and tensor, and 1 in the others.

    >>> check_expert_degree("vllm-mixtral-ep", {"tensor": 4, "data": 2, "ep": 8})
    {'tensor': 4, 'data': 2}
    """
    rest = {k: v for k, v in given.items() if k not in ("ep", "expert_parallel_size")}
    for name in given.keys() - rest.keys():
        whole = rest.get("tensor", 1) * rest.get("data", 1) if table.endswith("-ep") else 1
        if given[name] not in (1, whole):
            raise LayoutError(f"{table}: {name} = {excerpt(given[name])}; legal is {whole}, which is tp x dp, or none")
    return rest


def unknown_table(what: str, name: str, shipped: Iterable[str]) -> LayoutError:
    """Return the error of a name that is no table's, with the nearest.

    >>> unknown_table("a table", "vlm", ["vllm-llama"]).args[0][:58]
    "a table 'vlm' is no file and is not shipped; the nearest i"
    """
    near = get_close_matches(name, [*FRAMEWORKS, *shipped], 1, 0.5)
    hint = f"; the nearest is {near[0]}" if near else ""
    return LayoutError(
        f"{what} {excerpt(name)} is no file and is not shipped{hint}; legal are {', '.join(FRAMEWORKS)} with the "
        "model's config, a shipped table's name, or a table's path"
    )


def nearest_degrees(error: LayoutError, given: Mapping[str, Any], fits: Any, where: str) -> LayoutError:
    """Return an error with the nearest degrees that fit, in place of one that says why some do not.

    `fits` is called with degrees, and raises `LayoutError` for those that do not fit. Where no other value of one
    degree would do, the error is as it was.
    """

    def does_fit(name: str, value: int) -> bool:
        try:
            fits({**given, name: value})
        except LayoutError:
            return False
        return True

    wrong = [(name, n) for name, n in given.items() if type(n) is int and n > 1 and not does_fit(name, n)]
    for name, value in wrong:
        low = next((k for k in range(value - 1, max(value - _MOST_TRIED, 0), -1) if does_fit(name, k)), None)
        if low is None:
            continue
        high = next((k for k in range(value + 1, min(2 * value, value + _MOST_TRIED) + 1) if does_fit(name, k)), None)
        reason, cut = str(error).partition("; legal")[0], _uneven_cut(error)
        if cut is not None:
            reason = f"it does not divide {cut[0]} of {reason.partition(' = ')[0]}"
        legal = f"legal is {low}" if high is None else f"legal are {low} and {high}"
        more = f"; or {cut[1]}" if cut is not None and cut[1] else ""
        return LayoutError(f"{where}: {name} = {value}: {line(reason)}; {legal}, the nearest{more}")
    return error


def _uneven_cut(error: BaseException | None) -> tuple[int, str] | None:
    """The size that could not be cut, and what else would be legal, of the error behind one."""
    while error is not None:
        if isinstance(error, UnevenCut):
            return error.size, error.other
        error = error.__context__
    return None
