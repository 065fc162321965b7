"""Both sides of a conversion as they are asked for: in words, in texts, or not at all where the source says it."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardplan.errors import LayoutError, ParseError, excerpt
from shardplan.interop.checkpoint.manifest import CheckpointManifest
from shardplan.interop.checkpoint.optimizer_names import pass_states
from shardplan.interop.checkpoint.parameter_groups import said_steps
from shardplan.interop.checkpoint.sources import matches, newest_folder, open_checkpoint
from shardplan.interop.checkpoint.storage_detection import (
    UnknownModel,
    find_weights,
    follow_dtypes,
    framework_head,
    model_and_switches,
    read_dtypes,
    whole_weights,
)
from shardplan.movement.weights.configs import model_config
from shardplan.movement.weights.frameworks import FUSED_LORA, SideRequest, table_name
from shardplan.movement.weights.state import STEPS, part_masters
from shardplan.movement.weights.table import WeightTable, shipped_models, shipped_tables
from shardplan.movement.weights.towers import pass_tower
from shardplan.movement.weights.weights import Weights, load_weights, make_weights, read_weights

CONFIG = "config.json"
_ANY_MODEL = ("hf", "dcp")  # words of whole tensors under transformers' names
_DISK_DEGREES = ("tp", "tensor", "tensor_parallel_size", "divisible")  # what a torch_dist folder is stored by


@dataclass(frozen=True, slots=True)
class AskedConfig:
    """A model's config: the file that it is in, None where there is none, and fields that win over its own."""

    path: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def find(source: Path, given: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> AskedConfig:
        """Return that of a file or folder that is given, else that beside a checkpoint."""
        place = Path(given) if given is not None else source if source.is_dir() else source.parent
        path = place / CONFIG if place.is_dir() else place
        return AskedConfig(path if given is not None or path.is_file() else None, dict(overrides or {}))

    def data(self) -> dict[str, Any]:
        """Return the file's object with the fields that win: `text_config.rope_theta` is one within another.

        A field that the config says within one object alone, as transformers 5 says `rope_theta` in `rope_parameters`,
        is set there. Raises `ParseError` for a file that is no config.
        """
        if self.path is None:
            out: dict[str, Any] = {}
        else:
            model_config(self.path)  # which says what is wrong with it
            out = json.loads(self.path.read_text(encoding="utf-8"))
        for key, value in self.overrides.items():
            *outer, last = key.split(".")
            outer = outer or _only_place(out, last)
            within = out
            for name in outer:
                within = within.setdefault(name, {})
                if not isinstance(within, dict):
                    raise ParseError(
                        f"--set {key}: {name} is {excerpt(within)} in the config; legal is a field of an object"
                    )
            within[last] = value
        return out

    def sizes(self) -> Mapping[str, Any]:
        """Return what tables read: see `model_config`."""
        return model_config(self.data())


def _only_place(config: Mapping[str, Any], key: str) -> list[str]:
    """Where a config has a field: within which objects, outermost first; nothing where it is its own, or has it not."""
    if key in config:
        return []
    found: list[list[str]] = []
    for name, inner in config.items():
        if isinstance(inner, Mapping) and (key in inner or _only_place(inner, key)):
            found.append([name, *_only_place(inner, key)])
    if len(found) > 1:
        places = " and ".join(".".join([*place, key]) for place in found)
        raise ParseError(f"--set {key}: the config says it in {len(found)} places; legal are {places}")
    return found[0] if found else []


@contextmanager
def naming(option: str) -> Generator[None]:
    """Put an option before the errors of what it says."""
    try:
        yield
    except ParseError as error:
        raise ParseError(f"{option}: {error}") from None
    except LayoutError as error:
        raise LayoutError(f"{option}: {error}") from None


def recorded_weights(place: Path) -> Weights | None:
    """Return how a checkpoint says that it is stored, None where reshard did not write it."""
    recorded = CheckpointManifest.of(place) if place.is_dir() else None
    if recorded is None:
        return None
    said = Weights.parse(recorded.weights)
    table = part_masters(said.table)
    if table is said.table:
        return said
    return make_weights(table, dict(said.config), dict(said.given), said.devices, said.dtype)


def source_weights(
    place: Path, text: str | None, config: AskedConfig, dtype: str | None = None, ignored: Sequence[str] = (),
    any_model: bool = False, option: str = "--from",
) -> Weights:  # fmt: skip
    """Return how a source is stored: as a text says, as it records itself, or as its files show.

    `dtype` is that of all parameters; else it is read of each. `any_model` takes whole tensors of a model that no table
    knows. Raises `LayoutError` and `ParseError`.
    """
    sizes = dict(config.sizes())
    with naming(option):
        request = None if text is None else SideRequest.parse(text)
    if request is None and (said := recorded_weights(place)) is not None:
        return said
    if STEPS not in sizes and not matches("optimizer.state.", ignored):
        sizes |= _said_sizes(place)
    with open_checkpoint(place, 2, ignored) as held:  # of files a device each has its own names
        if request is None or (request.is_word and len(held.places) == 1):
            try:
                found = find_weights(held, sizes, ignored)
                if request is not None:
                    _check_word(request, found, option)
            except UnknownModel:
                if not any_model or len(held.places) > 1:
                    raise
                return whole_weights(held)
            return found if dtype is None else replace(found, dtype=dtype)
        assert text is not None
        with naming(option):
            weights = read_weights(text, sizes or None, dtype=dtype, disk=True)
    if dtype is not None:
        return weights
    with open_checkpoint(place, len(weights.devices), ignored) as held:
        own = held.side(weights)
        held.check_names(own, ignored)
        return weights if own is not weights else read_dtypes(weights, held)


def _said_sizes(place: Path) -> dict[str, Any]:
    """What stands beside the tensors in place of a config's field: Megatron's count of steps."""
    steps = said_steps(newest_folder(place))
    return {} if steps is None else {STEPS: steps}


def _check_word(request: SideRequest, found: Weights, option: str) -> None:
    """Refuse a word, or degrees, that are not those of the tensors of one place; raises `LayoutError`."""
    model, switches = model_and_switches(found.table.name)
    said = (*switches, *request.switches)
    with naming(option):
        adapter = framework_head(found.table.name).endswith("peft")
        own = table_name(request.name, model, shipped_tables(), request.degrees, said, disk=True, adapter=adapter)
        names = ({p.name for p in table.parameters} for table in (WeightTable.read(own), found.table))
        if own != found.table.name and len({frozenset(x) for x in names}) > 1:
            raise LayoutError(f"{request.name}: the tensors are those of {found.table.name}; legal is to leave it out")
        cut = {k: n for k, n in request.degrees.items() if n != 1}
        if cut and request.form not in ("distributed", "megatron"):
            degrees = ", ".join(f"{k}={n}" for k, n in cut.items())
            raise LayoutError(f"{request.name} with {degrees}: the source is of one device; legal is no degree")


def target_weights(text: str, source: Weights, config: AskedConfig, dtype: str | None = None) -> tuple[Weights, str]:
    """Return how a destination is to be stored, and the form in which its framework reads it.

    Of a framework's word the model, and what else the tables of both must have, are the source's. Without `dtype`
    every parameter keeps the one it has. Raises `LayoutError` and `ParseError`.
    """
    with naming("--to"):
        target, form = _target(text, source, config, dtype)
    return target if dtype is not None or target is source else follow_dtypes(target, source), form


def fused_alike(source: Weights, target: Weights) -> Weights:
    """Return an adapter's source as a target has it that stores one A for q, k and v: its three are then copies."""
    if not dict(target.config).get(FUSED_LORA) or FUSED_LORA in dict(source.config):
        return source
    config = dict(source.config) | {FUSED_LORA: True}
    return make_weights(source.table, config, dict(source.given), source.devices, source.dtype)


def _target(text: str, source: Weights, config: AskedConfig, dtype: str | None) -> tuple[Weights, str]:
    sizes = {**dict(source.config), **config.sizes()}
    request = SideRequest.parse(text)
    if not request.is_word:
        return read_weights(text, sizes or None, dtype=dtype, disk=True), "auto"
    model, switches = model_and_switches(source.table.name)
    if model not in shipped_models():
        if request.name not in _ANY_MODEL or request.degrees:
            raise LayoutError(
                f"{text}: no table knows this model, whose tensors are whole; legal are {' and '.join(_ANY_MODEL)} "
                "without degrees, which keep its names, a file of layouts, or a table's path"
            )
        return source, request.form
    asked = SideRequest(request.name, request.degrees, (*switches, *request.switches))
    adapter = framework_head(source.table.name).endswith("peft")
    if adapter and request.name == "megatron" and "fused" in request.switches:
        sizes[FUSED_LORA] = True
    form = request.form
    if adapter and form == "parts":  # servers take peft's file whole, and cut it themselves
        asked, form = SideRequest(request.name, {}, asked.switches), "plain"
    if request.name == "megatron":  # whose folders have whole tensors, for ranks of any degrees that the model allows
        load_weights(SideRequest(request.name, request.degrees, switches), sizes, model=model, adapter=adapter)
        degrees = {k: n for k, n in request.degrees.items() if k in _DISK_DEGREES}
        asked = SideRequest(request.name, degrees, asked.switches)
    target = load_weights(asked, sizes, dtype=dtype, disk=True, model=model, adapter=adapter)
    table = pass_tower(source.table, target.table, framework_head(target.table.name))
    if table is not target.table:
        target = make_weights(table, sizes, dict(target.given), target.devices, target.dtype)
    target = pass_states(source, target, framework_head(target.table.name))
    if form == "parts" and len(target.devices) > target.degrees["tensor"]:
        form = "ranks"  # frameworks' own parts know ranks of tensor parallelism alone
    return target, form
