"""`Weights`: how one side stores a model, as data: a table, the degrees, the sizes of a config, and devices."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.core.decoding import decode_toml, read_text
from shardplan.core.dtypes import itemsize, short_name
from shardplan.core.mesh import Mesh
from shardplan.errors import LayoutError, ParseError, excerpt, line
from shardplan.movement.weights.arithmetic import names_in
from shardplan.movement.weights.binding import check_named
from shardplan.movement.weights.configs import model_config
from shardplan.movement.weights.cuts import OwnerTable
from shardplan.movement.weights.family import StoredFamily
from shardplan.movement.weights.frameworks import (
    SideRequest,
    check_expert_degree,
    model_of,
    nearest_degrees,
    spell_degrees,
    table_name,
)
from shardplan.movement.weights.logical import LogicalTensor
from shardplan.movement.weights.sizing import TableSizes
from shardplan.movement.weights.table import WeightTable, shipped_models, shipped_tables, toml_value
from shardplan.notebook import notebook_html

_WRITTEN = "legal is what str(weights) writes"
_MOST_DEVICES = 2**20

Scalar = str | int | float | bool
_DTYPES = ("dtype", "torch_dtype")  # where a config says it
_LENGTH = 16  # hexadecimal digits of a hash


@dataclass(frozen=True)  # no slots: what is worked out once is remembered
class Weights:
    """One side: a table, the degrees and tables of owners that were given, what the table needs of the config, devices.

    Made by `load` or `parse`; two sides of equal text are equal. A *rank* here is a device's id.

    >>> config = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...           "num_hidden_layers": 2, "vocab_size": 10}
    >>> w = Weights.load("vllm-llama", config, tensor=2)
    >>> w.names(1)[2:4]
    ['model.norm.weight', 'model.layers.0.input_layernorm.weight']
    >>> w.shape("model.layers.1.self_attn.qkv_proj.weight", 1), Weights.parse(str(w)) == w
    ((8, 8), True)
    """

    table: WeightTable
    config: tuple[tuple[str, Scalar], ...]
    given: tuple[tuple[str, int | OwnerTable], ...]
    devices: tuple[int, ...]
    dtype: str

    _repr_html_ = notebook_html

    @staticmethod
    def load(
        path_or_name: str | Path,
        config: Mapping[str, Any] | str | Path,
        *,
        devices: Iterable[int] | None = None,
        dtype: str | None = None,
        **degrees: Any,
    ) -> Weights:
        """Return one side of a table (a path, or the name of a shipped one), a config, and degrees.

        Args:
            path_or_name: a framework's word, `vllm` (see `FRAMEWORKS`), whose table for a live model of this config is
                meant; a TOML file; or a shipped table: `vllm-llama`.
            config: the model's config as a mapping, or the path of its config.json or of the folder that has it.
            devices: the ids of the devices, in mesh order; 0, 1, ... where none are given.
            dtype: the elements' dtype; that of the config where none is given, and bf16 where it has none.
            degrees: sizes of axes by the table's names, or as `tp`, `pp`, `dp`, `ep`, `etp`, `vpp`; and tables of
                owners (`stages=[23, 24, 24, 23]`).

        Raises:
            LayoutError: a degree that does not fit, with the nearest that do; a config or a table that does not fit,
                or a shape that does not multiply out.
            ParseError: a file or an expression that is malformed.
        """
        return load_weights(SideRequest(str(path_or_name), degrees), config, devices, dtype)

    @staticmethod
    def parse(text: str) -> Weights:
        """Read what `str` writes, to an equal value; raises `ParseError` and `LayoutError`."""
        try:
            data = decode_toml(text)
        except ParseError as error:
            raise ParseError(f"the text of weights: {line(error)}; legal is what str(weights) writes") from None
        side = data.pop("side", None)
        if not isinstance(side, dict) or side.get("version") != 1:
            raise ParseError("the text of weights has no [side] of version 1; legal is what str(weights) writes")
        for key, kind in (("config", dict), ("degrees", dict), ("dtype", str), ("devices", list)):
            if not isinstance(side.get(key), kind):
                raise ParseError(f"the text of weights: side.{key} is {excerpt(side.get(key))}; {_WRITTEN}")
        spans: list[Any] = side["devices"]
        whole = all(isinstance(s, list) and len(s) == 2 and all(type(i) is int and i >= 0 for i in s) for s in spans)
        if not whole or sum(max(0, stop - start) for start, stop in spans) > _MOST_DEVICES:
            raise ParseError(f"the text of weights: side.devices is {excerpt(spans)}; {_WRITTEN}")
        devices = [i for start, stop in spans for i in range(start, stop)]
        return make_weights(
            WeightTable.of(data, "the text of weights"), side["config"], side["degrees"], devices, side["dtype"]
        )

    def __str__(self) -> str:
        """Return the text: TOML, a few kB, families and no names; `parse` reads it back to an equal value."""
        spans: list[list[int]] = []
        for i in self.devices:
            if spans and spans[-1][1] == i:
                spans[-1][1] = i + 1
            else:
                spans.append([i, i + 1])
        head = {"version": 1, "dtype": self.dtype, "devices": spans}
        head |= {"degrees": dict(self.given), "config": dict(self.config)}
        return self.table.toml() + "[side]\n" + "".join(f"{k} = {toml_value(v)}\n" for k, v in head.items())

    @cached_property
    def hash(self) -> str:
        """The hash of the text: it covers table, config, degrees, tables of owners, devices and dtype."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:_LENGTH]

    @cached_property
    def mesh(self) -> Mesh:
        """The table's mesh with its sizes and devices."""
        return Mesh({a: self.sizing.degrees[a] for a in self.table.meshes[0][1]} or {"device": 1}, devices=self.devices)

    @cached_property
    def degrees(self) -> dict[str, int]:
        """Every degree, those by default too."""
        return dict(self.sizing.degrees)

    @cached_property
    def sizing(self) -> TableSizes:
        """The sizes of atoms, degrees and meshes."""
        return TableSizes(self.table, dict(self.config), dict(self.given))

    def config_keys(self) -> set[str]:
        """Return the keys of the config that the table asks for, and its family for what sides must agree on."""
        _ = self.families
        return self.sizing.used | {name for _, text in self.table.agree for name in names_in(text)}

    @cached_property
    def tensors(self) -> dict[str, LogicalTensor]:
        """The logical tensors that are stored, by name."""
        return {t: self.sizing.tensor(t) for f in self.families for t in f.tensors}

    @cached_property
    def families(self) -> tuple[StoredFamily, ...]:
        """The stored parameters that this config has, lowered, in order of the table."""
        found = tuple(self.sizing.family(p, self.dtype) for p in self.table.parameters if self.sizing.has(p))
        if not found:
            raise LayoutError(f"{self.table.name or 'the table'} stores no parameter; legal is at least one")
        return found

    def place(self, rank: int) -> int:
        """Return a rank's place in mesh order; raises `LayoutError`."""
        if rank not in self._places:
            raise LayoutError(f"rank {excerpt(rank)} is not one of these weights; legal are {_spans(self.devices)}")
        return self._places[rank]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {device: place for place, device in enumerate(self.devices)}

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """For every place, the number that the first name of every family has in `names`, and the number of names."""
        counts = np.array([np.where(f.present, f.counts, 0) for f in self.families])
        sums = np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])
        return tuple(map(tuple, sums.T.tolist()))

    def names(self, rank: int) -> list[str]:
        """Return the names of the parameters that a rank has, family by family; raises `LayoutError`."""
        return [name for name, _, _ in self.parameters(rank)]

    def parameters(self, rank: int) -> list[tuple[str, tuple[int, ...], str]]:
        """Return the name, local shape and dtype of every parameter of a rank, in order; raises `LayoutError`."""
        place = self.place(rank)
        out: list[tuple[str, tuple[int, ...], str]] = []
        for family in self.families:
            if family.present[place]:
                shape = family.local_shape(place)
                out += [(name, shape, family.dtype) for name in family.device_names(place)]
        if len({name for name, _, _ in out}) < len(out):
            names = [name for name, _, _ in out]
            twice = next(name for name in names if names.count(name) > 1)
            raise LayoutError(f"rank {rank} has two parameters called {twice}; legal is a name for each")
        return out

    def shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the local shape of a parameter of a rank; raises `LayoutError` where the rank does not have it."""
        for known, shape, _ in self.parameters(rank):
            if known == name:
                return shape
        raise LayoutError(f"rank {rank} has no parameter {excerpt(name)}; legal are those of names({rank})")

    def check(self, named: Mapping[str, Any], rank: int) -> None:
        """Compare tensors by name (anything with a `shape`) with what a rank should have.

        What the family says is recomputed may be there beside it.

        Raises `WeightsMismatch`, a `LayoutError`, with every missing, additional and misshapen parameter at once.
        """
        where = f"rank {rank} of {self.table.name or 'the table'}"
        check_named(self.parameters(rank), named, where, self.table.recomputed)

    def nbytes(self, rank: int) -> int:
        """Return the bytes of all parameters of a rank."""
        return sum(math.prod(shape) * itemsize(dtype) for _, shape, dtype in self.parameters(rank))


def read_weights(
    text: str,
    config: Mapping[str, Any] | str | Path | None,
    devices: Iterable[int] | None = None,
    dtype: str | None = None,
    disk: bool = False,
) -> Weights:
    """Return the weights that a text says, or the path of one: `vllm,tp=8`, a table and degrees, `str(weights)`.

    Raises `ParseError` and `LayoutError`.
    """
    if "\n[side]\n" in text:
        return Weights.parse(text)
    request = SideRequest.parse(text)
    path = Path(request.name)
    if path.is_file() and "\n[side]\n" in (said := read_text(path)):
        return Weights.parse(said)
    if config is None:
        raise LayoutError("no config; legal is --config with the model's config.json")
    given = request.degrees.pop("devices", devices)
    return load_weights(request, config, given, dtype, disk)


def load_weights(
    request: SideRequest,
    config: Mapping[str, Any] | str | Path,
    devices: Iterable[int] | None = None,
    dtype: str | None = None,
    disk: bool = False,
    model: str | None = None,
    adapter: bool = False,
) -> Weights:
    """Return one side as it is asked for; `disk` says that a framework's word means a checkpoint. See `Weights.load`.

    `model` is its name as tables are called, where it is not the config's; `adapter` says that its adapter is meant.
    """
    sizes = model_config(config)
    name = request.name
    if request.is_word:
        name = table_name(
            name,
            model or model_of(sizes, shipped_models()),
            shipped_tables(),
            request.degrees,
            request.switches,
            disk=disk,
            adapter=adapter,
        )
    table = WeightTable.read(name)
    given = spell_degrees(request.degrees, [*(n for n, _ in table.degrees), *table.rules])
    if request.is_word and not {"expert", "ep"} & {n for n, _ in table.degrees}:
        given = check_expert_degree(name, given)
    if dtype is None:
        dtype = next((str(sizes[k]).removeprefix("torch.") for k in _DTYPES if sizes.get(k)), "bf16")

    def fits(degrees: Mapping[str, Any]) -> Weights:
        return make_weights(table, sizes, degrees, None, dtype)

    try:
        return fits(given) if devices is None else make_weights(table, sizes, given, devices, dtype)
    except LayoutError as error:
        raise nearest_degrees(error, given, fits, table.name or "the table") from None


def make_weights(
    table: WeightTable, config: Mapping[str, Any], given: Mapping[str, Any], devices: Iterable[int] | None, dtype: str
) -> Weights:
    """Return weights of a table that is read; as `Weights.load`."""
    config = model_config(config)
    degrees: dict[str, int | OwnerTable] = {}
    legal = [*(name for name, _ in table.degrees), *table.rules]
    for name, value in given.items():
        if name not in legal:
            raise LayoutError(f"{table.name or 'the table'} has no degree {name}; legal are {', '.join(legal)}")
        degrees[name] = _owners(name, value) if name in table.rules else _degree(name, value)
    sizes = TableSizes(table, config, degrees)
    found = tuple(range(sizes.count)) if devices is None else tuple(devices)
    if len(found) != sizes.count:
        raise LayoutError(f"{len(found)} devices for a mesh of {sizes.count}; legal is a device for each place")
    mesh = Mesh({a: sizes.degrees[a] for a in table.meshes[0][1]} or {"device": 1}, devices=found)
    probe = Weights(table, _scalars(config, config), tuple(degrees.items()), mesh.devices, short_name(dtype))
    used = probe.config_keys()
    return Weights(table, _scalars(config, used), tuple(sorted(degrees.items())), mesh.devices, short_name(dtype))


def _degree(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(f"the degree {name} is {excerpt(value)}; legal is a whole number of at least 1")
    return value


def _owners(name: str, value: object) -> OwnerTable:
    entries = list(value) if isinstance(value, list | tuple) else []
    if entries and all(isinstance(v, int) and v >= 0 for v in entries):
        return tuple(entries)
    if entries and all(isinstance(v, list | tuple) and all(isinstance(i, int) for i in v) for v in entries):
        return tuple(tuple(v) for v in entries)
    raise LayoutError(f"{name} is {excerpt(value)}; legal is a list of counts, or of lists of indices, one a piece")


def _scalars(config: Mapping[str, Any], keys: Iterable[str]) -> tuple[tuple[str, Scalar], ...]:
    return tuple((k, config[k]) for k in sorted(keys) if isinstance(config.get(k), str | int | float | bool))


def _spans(devices: tuple[int, ...]) -> str:
    low, high = min(devices), max(devices)
    return f"{low} to {high}" if high - low + 1 == len(devices) else excerpt(devices)


def names_of(weights: Weights, rank: int) -> list[str]:
    """Return the names of a rank, remembered with the weights."""
    kept: dict[int, list[str]] = weights.__dict__.setdefault("_names_by_rank", {})
    if rank not in kept:
        kept[rank] = weights.names(rank)
    return kept[rank]
