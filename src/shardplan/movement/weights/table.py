"""`WeightTable`: how a framework stores a family of models, as data: families of parameters, and no names.

A table is a TOML file with a family file beside it; both may stand on another (`base`), and what a file says wins over
what it stands on, but for the parameters that `without` names. A family says the logical tensors: their dims, as
products of atoms, whose sizes are arithmetic over the config. A table says `mesh` (and `meshes`, by name, on the same
devices), `degrees` with defaults, `numbers` (axes that stand in the name), `atoms`, `split` (this side's own digits of
an atom), `holes` (what stands in the name), and `parameters`: `name`, `is`, `on`, `when`, `unless`, `mesh`, `dtype`,
`plus`.

Models of one family differ in features: biases, norms, what is fused. A feature is an atom of the family, which a
condition reads; `models` of the family says, by `model_type`, which atoms are others, what a config that is silent
means (`config`), and how names differ (`names`). So `hf-llama` is the file of that name, and `hf-qwen2` is that file
for the model `qwen2`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from shardplan.core.decoding import decode_toml, read_text
from shardplan.core.notation import NAME
from shardplan.errors import LayoutError, ParseError, excerpt, line
from shardplan.hardware.toml_fields import basic_string
from shardplan.movement.weights.form import RULES, StoredForm, cuts_of, parse_product
from shardplan.movement.weights.frameworks import unknown_table

SHIPPED = Path(__file__).parent / "tables"
_PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*(?:\.local)?)\}")
Pairs = tuple[tuple[str, str], ...]
On = tuple[tuple[str, str | int], ...]
_KEYS = {
    "table": ("version", "name", "family", "base", "source", "mesh", "meshes", "degrees", "numbers", "atoms", "split",
              "holes", "parameters", "without", "model", "of"),
    "family": ("version", "base", "source", "atoms", "tensors", "same", "scales", "dtypes", "agree", "recomputed",
               "models", "defaults"),
}  # fmt: skip
_LONGEST_NAME = 250  # bytes of a file's name without its ending
_MOST_BASES = 8


@dataclass(frozen=True, slots=True)
class TableParameter:
    """One entry of a table: a pattern of names, what stands under them, and where."""

    name: str
    form: StoredForm
    on: On = ()
    when: str = ""
    unless: str = ""
    mesh: str = ""
    dtype: str = ""
    plus: int = 0

    @property
    def places(self) -> tuple[str, ...]:
        """What stands in braces in the name, in order."""
        return tuple(dict.fromkeys(_PLACE.findall(self.name)))

    def fill_name(self, values: Mapping[str, int]) -> str:
        """Return the name with its braces filled."""
        return _PLACE.sub(lambda match: str(values[match.group(1)]), self.name)


@dataclass(frozen=True, slots=True)
class WeightTable:
    """A table with its family, complete: nothing refers to another file.

    `meshes` has the axes of each mesh, major first, that of `""` first; `tensors` the dims of logical tensors; `same`
    which tensor is another one, and when; `scales` which tensor holds the block scales of another, and the sizes of
    a block; `dtypes` those of tensors that do not have the side's; `agree` what both sides' configs must agree on;
    `defaults` what a config means that does not say a field; `recomputed` the names, as patterns, of what every
    framework works out of the config: it may be stored, and nobody needs it.
    """

    name: str
    source: str
    meshes: tuple[tuple[str, tuple[str, ...]], ...]
    degrees: tuple[tuple[str, str | int], ...]
    numbers: Pairs
    atoms: Pairs
    tensors: Pairs
    same: tuple[tuple[str, str, str], ...]
    scales: tuple[tuple[str, str, tuple[str, ...]], ...]
    dtypes: Pairs
    agree: Pairs
    defaults: tuple[tuple[str, bool | int], ...]
    recomputed: tuple[str, ...]
    split: Pairs
    holes: Pairs
    parameters: tuple[TableParameter, ...]

    @staticmethod
    def read(path_or_name: str | Path) -> WeightTable:
        """Read a table by path, or by the name of a shipped one; raises `LayoutError` and `ParseError`."""
        path, model = _resolve_table(path_or_name)
        data = _read_with_base(path, "table", 0)
        family, model = data.pop("family", None), data.pop("model", "") if model is None else model
        if family is None and "of" in data:
            return _table(str(line(path)), data)
        if not isinstance(family, str):
            raise LayoutError(
                f"{line(path)}: the table names no family; legal is family = a path, a shipped family, or [of] inside"
            )
        of = _read_with_base(find_table_file(family, "a family", path.parent), "family", 0)
        if model:
            data = _of_model(data, of, str(model), str(line(path)))
            data["name"] = Path(path_or_name).stem
        of.pop("models", None)
        return _table(str(line(path)), data | {"of": of})

    @staticmethod
    def of(data: dict[str, Any], where: str) -> WeightTable:
        """Make a table from its complete data, as `toml` writes it; raises `LayoutError` and `ParseError`."""
        return _table(where, data)

    @property
    def rules(self) -> tuple[str, ...]:
        """The tables of owners that its cuts name."""
        dims = [d for p in self.parameters for d in p.form.dims] + [parse_product(text) for _, text in self.holes]
        return tuple(dict.fromkeys(c.rule for d in dims for c in cuts_of(d) if c.rule not in RULES))

    def toml(self) -> str:
        """Return the table as TOML, complete."""
        out = [f"name = {basic_string(self.name)}", f"source = {basic_string(self.source)}"]
        sections: dict[str, list[tuple[str, Any]]] = {
            "meshes": [(name or "main", list(axes)) for name, axes in self.meshes],
            **{f.name: list(getattr(self, f.name)) for f in fields(self) if f.name in ("degrees", "numbers", "atoms")},
            "of.tensors": list(self.tensors),
            "of.same": [(name, {"as": other, "when": when}) for name, other, when in self.same],
            "of.scales": [(name, {"of": other, "block": list(block)}) for name, other, block in self.scales],
            "of.dtypes": list(self.dtypes),
            "of.agree": list(self.agree),
            "of.defaults": list(self.defaults),
            "split": list(self.split),
            "holes": list(self.holes),
        }
        if self.recomputed:
            out.append(f"[of]\nrecomputed = {toml_value(self.recomputed)}")
        for title, rows in sections.items():
            if rows:
                out += [f"[{title}]", *(f"{key} = {toml_value(value)}" for key, value in rows)]
        for p in self.parameters:
            out.append("[[parameters]]")
            rows = {"name": p.name, "is": str(p.form), "on": dict(p.on), "when": p.when, "unless": p.unless}
            rows |= {"mesh": p.mesh, "dtype": p.dtype, "plus": p.plus}
            out += [f"{key} = {toml_value(value)}" for key, value in rows.items() if value]
        return "\n".join(out) + "\n"


def toml_value(value: object) -> str:
    """Return a value as TOML writes it: strings, whole numbers, truth, floats, lists and tables of them."""
    if isinstance(value, str):
        return basic_string(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items()) + " }"
    return repr(value)


@cache
def table_files() -> tuple[str, ...]:
    """Return the names of the files of shipped tables, sorted."""
    return tuple(sorted(p.stem for p in SHIPPED.glob("*.toml") if not p.stem.endswith(".family")))


@cache
def shipped_tables() -> tuple[str, ...]:
    """Return the names of the shipped tables, sorted: the files, and each for every other model of its family.

    >>> {"hf-llama", "hf-qwen2", "vllm-gemma3"} <= set(shipped_tables())
    True
    """
    files, models = table_files(), shipped_models()
    others = (
        _name_for(name, family, model)
        for name in files
        for model, family in models.items()
        if model != family and _is_of(name, family)
    )
    return tuple(sorted({*files, *others}))


@cache
def shipped_models() -> dict[str, str]:
    """Return every model that shipped tables know, as tables are called, and the family that it is of.

    >>> shipped_models()["qwen2"]
    'llama'
    """
    found: dict[str, str] = {}
    for path in sorted(SHIPPED.glob("*.family.toml")):
        models = _decode_shipped(path).get("models", {})
        found |= {name.replace("_", "-"): path.name.removesuffix(".family.toml") for name in models}
    return found


def _is_of(table: str, family: str) -> bool:
    """Whether a table's name says a family: `hf-deepseek-v3-fp8` says `deepseek-v3`."""
    return bool(re.search(rf"-{re.escape(family)}(?:-(?:fp8|mxfp4|mtp|ep|split))*\Z", table))


def _name_for(table: str, family: str, model: str) -> str:
    head, _, tail = table.rpartition(f"-{family}")
    return f"{head}-{model}{tail}"


def _resolve_table(path_or_name: str | Path) -> tuple[Path, str | None]:
    """The file of a table, and for which other model of its family it is asked, if it is."""
    name, stem = str(path_or_name), Path(path_or_name).name.removesuffix(".toml")
    if name.removesuffix(".toml") == stem and stem in shipped_tables() and not (SHIPPED / f"{stem}.toml").is_file():
        for model, family in shipped_models().items():
            file = _name_for(stem, model, family) if _is_of(stem, model) else ""
            if file in table_files():
                return SHIPPED / f"{file}.toml", model
    return find_table_file(path_or_name, "a table of weights"), None


def _of_model(data: dict[str, Any], of: dict[str, Any], model: str, where: str) -> dict[str, Any]:
    """The data of a table for one model of its family, whose data are changed, too; raises `LayoutError`."""
    models: dict[str, Any] = of.get("models", {})
    own = next((v for k, v in models.items() if model in (k, k.replace("_", "-"))), None)
    if not isinstance(own, dict):
        raise LayoutError(
            f"{where}: the model {model} is none of its family's; legal are {', '.join(models) or 'none'}"
        )
    features = {k: v for k, v in own.items() if k not in ("config", "names")}
    if strange := next((k for k in features if k not in of.get("atoms", {})), None):
        raise LayoutError(f"{where}: the model {model} has {strange}, which is no atom of its family")
    of["atoms"] = of["atoms"] | features
    of["defaults"] = {**of.get("defaults", {}), **own.get("config", {})}

    def renamed(name: str) -> str:
        for old, new in own.get("names", {}).items():
            name = re.sub(rf"(?<![\w]){re.escape(old)}(?![\w])", new, name)
        return name

    return data | {"parameters": [p | {"name": renamed(p["name"])} for p in data.get("parameters", [])]}


def find_table_file(path_or_name: str | Path, what: str, beside: Path | None = None) -> Path:
    """Return the path of a table or family: as given, beside a file, or shipped; raises `LayoutError`."""
    given = Path(path_or_name)
    if not given.name or "\0" in str(given) or len(given.name.encode()) > _LONGEST_NAME:
        raise LayoutError(f"{what} {excerpt(str(path_or_name))} is no path; shipped are {', '.join(shipped_tables())}")
    named = given if given.suffix == ".toml" else given.with_name(given.name + ".toml")
    for path in ((beside or Path()) / given, (beside or Path()) / named, SHIPPED / named.name):
        if path.is_file() and path.suffix == ".toml":
            return path
    raise unknown_table(what, str(path_or_name), shipped_tables())


@lru_cache(maxsize=128)
def _decode_shipped(path: Path) -> dict[str, Any]:
    return decode_toml(read_text(path))


def _read_with_base(path: Path, kind: str, depth: int) -> dict[str, Any]:
    """The data of a file, on that of its base."""
    try:
        data = copy.deepcopy(_decode_shipped(path)) if path.parent == SHIPPED else decode_toml(read_text(path))
    except ParseError as error:
        raise ParseError(f"{line(path)}: {line(error)}; legal is a TOML file") from None
    for key in data:
        if key not in _KEYS[kind]:
            raise LayoutError(f"{line(path)}: unknown key {key!r}; legal: {', '.join(_KEYS[kind])}")
    if not isinstance(data.get("parameters", []), list):
        raise LayoutError(f"{line(path)}: parameters = {excerpt(data['parameters'])}; legal are [[parameters]]")
    base, names = data.pop("base", None), data.pop("without", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LayoutError(f"{line(path)}: without = {excerpt(names)}; legal is a list of names")
    if data.get("version", 1) != 1:
        raise LayoutError(f"{line(path)}: version {excerpt(data['version'])}; legal is 1")
    if base is None:
        return data
    if depth == _MOST_BASES or not isinstance(base, str):
        raise LayoutError(f"{line(path)}: base = {excerpt(base)}; legal is a file that does not stand on this one")
    below = _read_with_base(find_table_file(base, "a base", path.parent), kind, depth + 1)
    if names:
        below["parameters"] = _remove_parameters(below.get("parameters", []), names, f"{line(path)}: without")
    for key, value in data.items():
        old = below.get(key)
        if key == "parameters" and isinstance(old, list):
            mine = [p.get("name") for p in value if isinstance(p, dict)]
            below[key] = [p for p in old if not isinstance(p, dict) or p.get("name") not in mine] + value
        elif isinstance(old, dict) and isinstance(value, dict):
            below[key] = old | value
        elif key == "recomputed" and isinstance(old, list) and isinstance(value, list):
            below[key] = old + value
        else:
            below[key] = value
    return below


def _remove_parameters(parameters: list[Any], names: list[str], where: str) -> list[Any]:
    """The parameters of a base less some; raises `LayoutError` for a name that it does not have."""
    known = [p["name"] for p in parameters if isinstance(p, dict) and isinstance(p.get("name"), str)]
    if strange := next((name for name in names if name not in known), None):
        raise LayoutError(f"{where} has {excerpt(strange)}; legal are parameters of the base: {', '.join(known)}")
    return [p for p in parameters if not isinstance(p, dict) or p.get("name") not in names]


def _table(where: str, data: dict[str, Any]) -> WeightTable:
    def section(name: str, of: dict[str, Any]) -> dict[str, Any]:
        found = of.get(name, {})
        if not isinstance(found, dict) or not all(NAME.fullmatch(key) for key in found):
            raise LayoutError(f"{where}: [{name}] is {excerpt(found)}; legal is a table of names")
        return found

    def texts(name: str, of: dict[str, Any]) -> Pairs:
        found = section(name, of)
        for key, value in found.items():
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise LayoutError(f"{where}: {name}.{key} = {excerpt(value)}; legal is text, or a whole number")
        return tuple((key, str(value)) for key, value in found.items())

    family = section("of", data)
    meshes = {"": data["mesh"]} if "mesh" in data else {}
    meshes |= {("" if name == "main" else name): axes for name, axes in section("meshes", data).items()}
    for name, axes in meshes.items():
        if (
            not isinstance(axes, list)
            or not all(isinstance(a, str) and NAME.fullmatch(a) for a in axes)
            or len(set(axes)) < len(axes)
        ):
            raise LayoutError(f"{where}: the mesh {name or 'mesh'} = {excerpt(axes)}; legal is a list of distinct axes")
    if "" not in meshes:
        raise LayoutError(f"{where}: no mesh; legal is mesh = a list of axes, major first")
    same = [(k, _field(where, v, "as"), str(v.get("when", ""))) for k, v in section("same", family).items()]
    scales = [
        (k, _field(where, v, "of"), tuple(map(str, v.get("block", ())))) for k, v in section("scales", family).items()
    ]
    recomputed = family.get("recomputed", [])
    if not isinstance(recomputed, list) or not all(isinstance(name, str) for name in recomputed):
        raise LayoutError(f"{where}: recomputed = {excerpt(recomputed)}; legal is a list of names, with * for any part")
    degrees = section("degrees", data)
    for key, value in degrees.items():
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise LayoutError(f"{where}: the degree {key} = {excerpt(value)}; legal is a whole number, or text of one")
    return WeightTable(
        str(data.get("name", "")),
        str(data.get("source", "")),
        tuple((name, tuple(axes)) for name, axes in meshes.items()),
        tuple(degrees.items()),
        texts("numbers", data),
        tuple((dict(texts("atoms", family)) | dict(texts("atoms", data))).items()),
        texts("tensors", family),
        tuple(same),
        tuple(scales),
        texts("dtypes", family),
        texts("agree", family),
        tuple(section("defaults", family).items()),
        tuple(recomputed),
        texts("split", data),
        texts("holes", data),
        tuple(_parameter(where, p) for p in data.get("parameters", [])),
    )


def _field(where: str, value: object, key: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get(key), str):
        raise LayoutError(f"{where}: {excerpt(value)} lacks {key!r}; legal is a table with it")
    return value[key]


def _parameter(where: str, data: object) -> TableParameter:
    legal = ("name", "is", "on", "when", "unless", "mesh", "dtype", "plus")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not isinstance(data.get("is"), str):
        raise LayoutError(f"{where}: the parameter {excerpt(data)} lacks name or is; legal: {', '.join(legal)}")
    unknown = [key for key in data if key not in legal]
    if unknown:
        raise LayoutError(f"{where}: {data['name']}: unknown key {unknown[0]!r}; legal: {', '.join(legal)}")
    on = data.get("on", {})
    if not isinstance(on, dict) or not all(isinstance(v, int) or v in ("first", "last") for v in on.values()):
        raise LayoutError(f"{where}: {data['name']}: on = {excerpt(on)}; legal are axes, each first, last or a number")
    plus = data.get("plus", 0)
    if not isinstance(plus, int):
        raise LayoutError(f"{where}: {data['name']}: plus = {excerpt(plus)}; legal is a whole number")
    try:
        form = StoredForm.parse(data["is"])
    except ParseError as error:
        raise ParseError(f"{where}: {data['name']}: {str(error).splitlines()[0]}", error.text, error.position) from None
    words = {key: str(data.get(key, "")) for key in ("when", "unless", "mesh", "dtype")}
    return TableParameter(data["name"], form, tuple(on.items()), plus=plus, **words)
