"""Settings of an optimizer's parameter groups: learning rate, betas, weight decay, as each framework keeps them.

torch saves each as an object beside the tensors: `optim.param_groups.0.lr` with `optim.param_groups.0.params` for the
names of the group (state_dict.py of torch.distributed.checkpoint), or `param_groups.NAME.lr` of each parameter, as
torchtitan asks for. Megatron has all in `common.pt`, with the count of steps and without names: a group is known by
`wd_mult`, `lr_mult`, `is_expert_parallel` and `is_decoupled_lr` (megatron-core 0.16.1, optimizer/optimizer.py), and a
`wd_mult` of 0 is that of biases and parameters of one dim (optimizer/__init__.py).
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.errors import LayoutError, ParseError, excerpt, line
from shardplan.interop.checkpoint.distributed import ARCHIVE_ERRORS, REBUILD, file_of, open_part
from shardplan.interop.checkpoint.folders import METADATA, saved_tensors
from shardplan.interop.checkpoint.optimizer_names import SHARED_STEPS, UNDER, state_names
from shardplan.interop.checkpoint.pickle_reader import PickledCall, PickledName, PickledRows, read_pickle
from shardplan.interop.checkpoint.sources import OpenCheckpoint, matches
from shardplan.movement.weights.refit import RefitPlan
from shardplan.movement.weights.state import MASTER, STEP, STEPS, is_state
from shardplan.movement.weights.weights import names_of

COMMON = "common.pt"
Settings = dict[str, Any]
_TORCH = re.compile(r"(?:\w+\.)*?param_groups(?:\.(.+))?\Z")
_NUMBERED = re.compile(r"(\d+)\.(\w+)\Z")
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_ONLY_MEGATRON = (*_IDENTITY, *(f"pre_{key}" for key in _IDENTITY), "default_config", STEP)
# What torch's Adam and AdamW have in a group, and Transformer Engine's and Apex's fused ones, where a source has none.
_OF_TORCH: Settings = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
_OF_FUSED: Settings = {"bias_correction": True}
_MOST_STEPS = 2**53  # the whole numbers that a float holds
_SCHEDULES = ("opt_param_scheduler", "grad_scaler")  # of common.pt: what no parameter group holds
_LEAVE = "legal is --ignore '*param_groups*', which leaves the groups out"


@dataclass(frozen=True, slots=True)
class ParameterGroups:
    """Settings by the name of a stored parameter, the count of steps where it is said, and what no group can hold."""

    settings: Mapping[str, Settings]
    steps: float | None = None
    left: tuple[str, ...] = ()


def said_steps(folder: Path) -> float | None:
    """Return the count of steps that Megatron's `common.pt` in a folder says, None where there is none.

    Nothing else of the file is looked at. Raises `LayoutError` for several counts, and `ParseError`.
    """
    if not (folder / COMMON).is_file():
        return None
    saved = SavedObject(folder / COMMON)
    return _one_count(saved, _optimizers(saved))


def source_groups(held: OpenCheckpoint, ignored: Sequence[str] = ()) -> ParameterGroups | None:
    """Return the settings that a checkpoint has, None where it has none, or they are ignored.

    Raises `LayoutError` for groups of Megatron that do not say which parameters are theirs, and `ParseError`.
    """
    tensors = held.first_tensors
    if (held.path / COMMON).is_file():
        if matches("optimizer.param_groups", ignored):
            return None
        groups, steps, left, normed = _read_common(held.path)
        if not groups:
            return None
        states = state_names(tensors)
        shapes = {n: tuple(tensors[n].shape) for n in tensors if n not in states}
        return ParameterGroups(_by_decay(groups, shapes, normed), steps, left)
    if (held.path / METADATA).is_file():
        return _torch_groups(held, ignored)
    return None


def _read_common(folder: Path) -> tuple[list[Settings], float | None, tuple[str, ...], bool]:
    """Read the groups, the steps, what no group can hold, and whether norms of q and k decay."""
    saved = SavedObject(folder / COMMON)
    top, optimizers = saved.rows(saved.value), _optimizers(saved)
    groups = [
        {k: saved.plain_value(v) for k, v in group.items() if k != "params"}
        for each in optimizers
        for group in _raw_groups(saved, each)
    ]
    names = {*top, *saved.rows(top.get("optimizer"))}
    left = tuple(f"{name} of {COMMON}" for name in _SCHEDULES if name in names)
    normed = saved.rows(top.get("args")).get("apply_wd_to_qk_layernorm") is True
    return groups, _one_count(saved, optimizers), left, normed


def _optimizers(saved: SavedObject) -> list[dict[Any, Any]]:
    """The optimizers of `common.pt`, chained or one, each what it says of its groups and its state."""
    every = saved.rows(saved.rows(saved.value).get("optimizer"))
    chained = [saved.rows(v) for k, v in every.items() if type(k) is int] or [every]
    return [saved.rows(each["optimizer"]) if "optimizer" in each else each for each in chained]


def _raw_groups(saved: SavedObject, optimizer: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    found = optimizer.get("param_groups")
    return [saved.rows(group) for group in found] if isinstance(found, list) else []


def _one_count(saved: SavedObject, optimizers: Sequence[Mapping[Any, Any]]) -> float | None:
    """The count of steps of all groups and states; raises `LayoutError` where they differ, and `ParseError`."""
    said = [group.get(STEP) for each in optimizers for group in _raw_groups(saved, each)]
    said += [saved.rows(each.get("state")).get("common_step") for each in optimizers]
    counts: set[float] = set()
    for number in (saved.plain_value(value) for value in said if value is not None):
        if type(number) not in (int, float) or not 0 <= number < _MOST_STEPS:
            raise ParseError(f"{saved.where} has {excerpt(number)} steps; legal is a count")
        counts.add(float(number))
    if len(counts) > 1:
        texts = " and ".join(map(str, sorted(counts)))
        raise LayoutError(f"{COMMON} has counts of {texts} steps; legal is one, or --set {STEPS}=1000, that of the run")
    return next(iter(counts), None)


def _by_decay(groups: list[Settings], shapes: Mapping[str, tuple[int, ...]], normed: bool) -> dict[str, Settings]:
    """Return the settings of every name of Megatron's, by the rule that makes its groups."""
    kinds: dict[bool, Settings] = {}
    for group in groups:
        said = {key: group.get(key, group.get(f"pre_{key}")) for key in _IDENTITY}
        own = {k: v for k, v in group.items() if k not in _ONLY_MEGATRON}
        if said["wd_mult"] not in (0, 1) or said["lr_mult"] not in (None, 1) or said["is_decoupled_lr"]:
            text = ", ".join(f"{k} = {said[k]}" for k in ("wd_mult", "lr_mult", "is_decoupled_lr"))
            raise LayoutError(f"{COMMON} has a group of {text}, and not which parameters are in it; {_LEAVE}")
        other = kinds.setdefault(said["wd_mult"] == 1, own)
        if key := _first_apart(other, own):
            raise LayoutError(
                f"{COMMON} has groups of wd_mult = {said['wd_mult']} that differ in {key} ({other.get(key)} and "
                f"{own.get(key)}), and not which parameters are in which; {_LEAVE}"
            )
    if True not in kinds:
        raise LayoutError(f"{COMMON} has no group of wd_mult = 1; {_LEAVE}")
    return {n: dict(kinds.get(_decays(n, shape, normed), kinds[True])) for n, shape in shapes.items()}


def _decays(name: str, shape: tuple[int, ...], normed: bool = False) -> bool:
    """Whether Megatron lets a parameter decay: not a bias, nor one of one dim, in a layer where all are stacked."""
    dims = len(shape) - bool(re.search(r"\blayers\.(?!\d)", name))
    return (dims > 1 and not name.endswith(".bias")) or (normed and ("q_layernorm." in name or "k_layernorm." in name))


def _first_apart(a: Settings, b: Settings) -> str | None:
    """The first setting in which two groups differ; a list is a tuple here."""
    plain = ({k: tuple(v) if isinstance(v, list) else v for k, v in x.items()} for x in (a, b))
    first, second = plain
    return next((k for k in sorted({*first, *second}) if first.get(k) != second.get(k)), None)


def _torch_groups(held: OpenCheckpoint, ignored: Sequence[str]) -> ParameterGroups | None:
    """Read what torch saved beside the tensors: groups with their names, or settings of every parameter."""
    found = {fqn: p for (fqn, at), p in saved_tensors(held.path)[1].items() if not at and fqn not in held.first_tensors}
    groups: dict[str, Settings] = {}
    alone: dict[str, Settings] = {}
    for fqn, place in found.items():
        if (hit := _TORCH.match(fqn)) is None or matches(fqn, ignored):
            continue
        saved = SavedObject(file_of(held.path, place, fqn), place.offset, place.length)
        rest = hit.group(1)
        if rest is None:  # as torch 2.2 and before: one list
            for k, group in enumerate(saved.value if isinstance(saved.value, list) else []):
                groups[str(k)] = {key: saved.plain_value(v) for key, v in saved.rows(group).items()}
        elif numbered := _NUMBERED.match(rest):
            groups.setdefault(numbered.group(1), {})[numbered.group(2)] = saved.plain_value(saved.value)
        else:
            name, _, key = rest.rpartition(".")
            alone.setdefault(name, {})[key] = saved.plain_value(saved.value)
    for group in groups.values():
        own = {k: v for k, v in group.items() if k != "params"}
        named = group.get("params")
        alone |= {name: own for name in (named if isinstance(named, list | tuple) else ()) if isinstance(name, str)}
    known = held.first_tensors
    settings = {u + name: own for name, own in alone.items() for u in UNDER if u + name in known}
    return ParameterGroups(settings) if settings else None


def _sources_by_name(plan: RefitPlan) -> dict[str, dict[str, None]]:
    """Return the source's names, in order, that every model's parameter of the target is made of."""
    names: dict[str, dict[str, None]] = {}
    for rank in plan.target.devices:
        own = plan.target.parameters(rank)
        states = state_names([name for name, _, _ in own])
        r = plan.regions(rank)
        mine = r.target == rank
        columns = [np.asarray(c)[mine] for c in (r.target_parameter, r.source, r.source_parameter)]
        for t, s, k in np.unique(np.stack(columns), axis=1).T.tolist():
            name, _, _ = own[t]
            if name not in states and not name.startswith(SHARED_STEPS):
                names.setdefault(name, {})[names_of(plan.source, s)[k]] = None
    return names


def carried_groups(found: ParameterGroups, plan: RefitPlan) -> ParameterGroups:
    """Return the settings by the target's names; raises `LayoutError` where what is joined has several."""
    states = {n: s.parameter for n, s in _states_of_source(plan).items()}
    out: dict[str, Settings] = {}
    for name, made in _sources_by_name(plan).items():
        first: str | None = None
        for source in (states.get(s, s) for s in made):
            own = found.settings.get(source)
            if own is None:
                continue
            if first is not None and (key := _first_apart(found.settings[first], own)):
                raise LayoutError(
                    f"{name} is made of {first} and {source}, whose groups differ in {key} "
                    f"({found.settings[first].get(key)} and {own.get(key)}); {_LEAVE}"
                )
            first = first or source
        if first is not None:
            out[name] = dict(found.settings[first])
    return replace(found, settings=out)


def _states_of_source(plan: RefitPlan) -> dict[str, Any]:
    """The names of the source that are an optimizer's own copy of a parameter."""
    every = dict.fromkeys(n for rank in plan.source.devices for n in names_of(plan.source, rank))
    return {n: s for n, s in state_names(every).items() if s.state == MASTER}


def has_states(plan: RefitPlan) -> bool:
    """Whether the target stores an optimizer's states."""
    return any(is_state(t) for f in plan.target.families for t in f.tensors)


def source_steps(held: OpenCheckpoint) -> float | None:
    """Return the count of steps that tensors say, None where none does; raises `LayoutError` where they differ."""
    counts: dict[float, str] = {}
    states = state_names(held.first_tensors)
    for name, tensor in held.first_tensors.items():
        if (name in states and states[name].state == STEP) or name.startswith(SHARED_STEPS):
            raw = bytearray(int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize)
            tensor.read_into(memoryview(raw), 0)
            for step in np.unique(np.frombuffer(raw, tensor.dtype)).tolist():
                counts.setdefault(float(step), name)
    if len(counts) > 1:
        (a, one), (b, other) = list(counts.items())[:2]
        raise LayoutError(f"{one} is {a} and {other} {b}: Megatron has one count of steps for all; {_LEAVE}")
    return next(iter(counts), None)


def megatron_settings(found: ParameterGroups, plan: RefitPlan, steps: float | None) -> tuple[Settings, tuple[str, ...]]:
    """Return what `common.pt` says of these groups, and what a run of Megatron will not keep of them.

    Raises `LayoutError` for settings that its two groups cannot hold.
    """
    shapes = {name: shape for rank in plan.target.devices for name, shape, _ in plan.target.parameters(rank)}
    of: dict[bool, str] = {}
    left = list(found.left)
    for name, own in found.settings.items():
        decays = _decays(name, shapes[name])
        first = of.setdefault(decays, name)
        if key := _first_apart(found.settings[first], own):
            raise LayoutError(
                f"{first} and {name} differ in {key} ({found.settings[first].get(key)} and {own.get(key)}), and "
                f"Megatron has one group for {'matrices' if decays else 'biases and parameters of one dim'}; {_LEAVE}"
            )
    groups: list[Settings] = []
    for decays in (True, False):
        own = dict(found.settings[of[decays]]) if decays in of else {}
        _check_adam(own, of.get(decays, ""), ("amsgrad", True), ("maximize", True), ("decoupled_weight_decay", False))
        if not own:
            own = dict(found.settings[of[not decays]]) | ({} if decays else {"weight_decay": 0.0})
        if not decays and own.get("weight_decay"):
            left.append(
                f"weight_decay {own['weight_decay']} of biases and parameters of one dim ({of[False]}, ..), which "
                "Megatron's scheduler sets to 0"
            )
        said = {"wd_mult": float(decays), "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        count = {} if steps is None else {STEP: int(steps)}
        groups.append({**_OF_TORCH, **_OF_FUSED, **own, **said, "default_config": True, **count})
    if any("experts." in name for name in found.settings):
        left.append("groups of experts for runs with expert parallelism (is_expert_parallel)")
    state = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    return {"optimizer": state}, tuple(left)


def _check_adam(own: Settings, name: str, *illegal: tuple[str, Any]) -> None:
    """Refuse settings that another framework's Adam does not have."""
    for key, value in illegal:
        inert = key == "decoupled_weight_decay" and not own.get("weight_decay")
        if own.get(key) is value and not inert:
            raise LayoutError(f"{name} has {key} = {value}, which the destination's Adam cannot do; {_LEAVE}")


def torch_settings(found: ParameterGroups, flat: bool) -> list[tuple[str, Any]]:
    """Return the objects that torch's loader asks for, by name: of groups with their names, or flat, of each parameter.

    Raises `LayoutError` for settings that torch's Adam does not have.
    """
    groups: list[tuple[Settings, list[str]]] = []
    for name, settings in found.settings.items():
        _check_adam(settings, name, ("bias_correction", False))
        own = {**_OF_TORCH, **settings} if "betas" in settings else settings
        group = next((g for g in groups if _first_apart(g[0], own) is None), None)
        if group is None:
            groups.append((own, [name]))
        else:
            group[1].append(name)
    if flat:
        return [(f"optimizer.param_groups.{n}.{k}", v) for own, names in groups for n in names for k, v in own.items()]
    every = [({**own, "params": names}) for own, names in groups]
    return [(f"optimizer.param_groups.{k}.{key}", v) for k, own in enumerate(every) for key, v in own.items()]


_MOST = 2**26  # bytes of a pickle: settings of a run
_NUMBERS = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "LongStorage": "<i8", "IntStorage": "<i4",
}  # fmt: skip


class SavedObject:
    """What torch.save wrote at one place: its value as data, and the numbers of tensors beside it."""

    def __init__(self, path: Path, begin: int = 0, length: int | None = None) -> None:
        """Read it. Raises `ParseError` where it is not what torch.save writes."""
        self.where = f"{line(path)} at byte {begin}" if begin else line(path)
        self._numbers: dict[str, bytes] = {}
        try:
            size = path.stat().st_size - begin if length is None else length
            with open_part(path, begin, size) as part, zipfile.ZipFile(part) as archive:
                entries = {i.filename.partition("/")[2]: i for i in archive.infolist()}
                said = entries.get("data.pkl")
                if said is None or said.file_size > _MOST:
                    raise ParseError(f"{self.where} has no pickle of at most {_MOST} bytes; legal is one of torch.save")
                self.value = read_pickle(archive.read(said), None, persistent=True)
                for name, entry in entries.items():
                    if name.startswith("data/") and entry.file_size <= 8:
                        self._numbers[name.removeprefix("data/")] = archive.read(entry)
        except ParseError as error:
            raise ParseError(f"{self.where}: {line(error)}") from None
        except ARCHIVE_ERRORS as error:
            raise ParseError(f"{self.where}: {excerpt(error)}; legal is what torch.save writes") from None

    def rows(self, value: Any) -> dict[Any, Any]:
        """Return a dict, or the fields of an instance, by its keys that are texts or whole numbers; else nothing."""
        if isinstance(value, PickledCall):
            value = value.state if isinstance(value.state, PickledRows) else PickledRows(value.rows)
        rows = value.rows if isinstance(value, PickledRows) else []
        return {k: v for k, v in rows if isinstance(k, str) or type(k) is int}

    def plain_value(self, value: Any) -> Any:
        """Return a number, truth, text, None, or a flat list or tuple of such; raises `ParseError` for what is none.

        A tensor of one element is its number.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple) and all(x is None or isinstance(x, bool | int | float | str) for x in value):
            return value
        if isinstance(value, PickledCall) and (value.of.module, value.of.name) in REBUILD:
            storage: Any = value.arguments[0] if value.arguments else ()
            told = storage if isinstance(storage, tuple) and len(storage) > 2 else (None, None, None)
            kind = told[1].name if isinstance(told[1], PickledName) else ""
            raw = self._numbers.get(str(told[2]), b"")
            if kind in _NUMBERS and len(raw) == np.dtype(_NUMBERS[kind]).itemsize:
                return np.frombuffer(raw, _NUMBERS[kind])[0].item()
        named = isinstance(value, PickledCall | PickledName)
        what = (value.of if isinstance(value, PickledCall) else value).name if named else type(value).__name__
        raise ParseError(f"{self.where} has a {what}; legal are numbers, texts, and lists of them")
