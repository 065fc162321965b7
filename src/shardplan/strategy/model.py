"""`Model`: a program on one device, with names for its dims and its parameters; built from a preset or a family."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from shardplan.core import validation
from shardplan.core.dtypes import numpy_dtype, short_name
from shardplan.core.gradients import Origin
from shardplan.core.program import Program
from shardplan.core.target_counts import take_count_as_input
from shardplan.core.tensor import TensorType
from shardplan.errors import LayoutError, ShardplanError, excerpt, near_text
from shardplan.strategy.decoders import decoder
from shardplan.strategy.model_config import is_config, load_config
from shardplan.strategy.model_sizes import with_sizes
from shardplan.strategy.narrowing import narrow_products
from shardplan.strategy.parameter import Array, Parameter
from shardplan.strategy.perceptrons import perceptron, recommender
from shardplan.strategy.scope import Scope
from shardplan.strategy.sizes import DecoderSizes, PerceptronSizes, RecommenderSizes
from shardplan.strategy.training import MASTER, OPTIMIZERS, Training, recipe_of, rename_values, training_program

_PRESETS = Path(__file__).parent / "presets"
_FAMILIES: dict[str, tuple[Any, Any]] = {  # sizes, and what writes the program
    "gpt": (DecoderSizes, decoder),
    "llama": (DecoderSizes, decoder),
    "moe": (DecoderSizes, decoder),
    "mlp": (PerceptronSizes, perceptron),
    "dlrm": (RecommenderSizes, recommender),
}


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of every preset, by its name."""
    tables = (tomllib.loads(path.read_text()) for path in sorted(_PRESETS.glob("*.toml")))
    return MappingProxyType({name: found for table in tables for name, found in table.items()})


@dataclass(frozen=True, slots=True, repr=False)
class Model:
    """A program with names: strategies address dims and parameters by them.

    Parameters are inputs; those of layers are stacked, `layers.q` of dims `layer hidden kv_heads ratio head`. Outputs
    are `loss`, or without training `logits` (of an MLP `outputs`); `layers.dropped`, the choices that a layer's experts
    had no room for; and of an input that is replaced, `next.` and its name, else of a parameter `gradient.` and its.

    `dims` has the names of every input's dims, `gradients` the value that is a parameter's gradient, `replaced` the
    output that takes an input's place in the next run: parameters, state and step of an optimizer, caches and position.
    `origins` says of the first steps of a training program which forward step they are the gradient of (None: they are
    forward steps); those behind are the optimizer's. `constants` are the values of inputs that an import's source has,
    `constraints` the axes that it asks for, by value and dim, `annotations` how its source says that inputs and results
    lie, on the source's mesh, which `sp.why` takes, `places` where it makes a value; `spare` names what a checkpoint of
    the source has and no input is: a tensor's second name, and buffers that an import has evaluated.
    """

    name: str
    program: Program
    fields: Mapping[str, Any] = field(hash=False)
    dims: Mapping[str, tuple[str, ...]] = field(hash=False)
    parameters: Mapping[str, Parameter] = field(hash=False)
    gradients: Mapping[str, str] = field(hash=False)
    replaced: Mapping[str, str] = field(hash=False)
    origins: tuple[Origin | None, ...] = ()
    forward: Program | None = field(default=None, compare=False)  # what it was trained from
    constants: Mapping[str, Array] = field(default_factory=dict[str, Array], compare=False)
    constraints: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict[str, Any], hash=False)
    annotations: Mapping[str, TensorType] = field(default_factory=dict[str, TensorType], compare=False)
    places: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    spare: frozenset[str] = field(default=frozenset(), compare=False)

    @staticmethod
    def load(
        name: str,
        /,
        *,
        training: bool = True,
        optimizer: str | None = "",
        dtype: str = "f32",
        precision: str | None = None,
        ignore: Iterable[str] = (),
        **fields: Any,
    ) -> Model:
        """Build a preset, or a family (gpt, llama, moe, mlp, dlrm) by its sizes, which win over a preset's.

        Args:
            name: A preset or a family; or the path of a Hugging Face config.json, or of the folder that has it.
            training: Whether it is a training step, or the forward pass alone: with `cache=` positions of a cache that
                it reads and writes, as in prefill and, with `seq=1`, decode.
            optimizer: `sgd`, `adamw` (by default, where it trains), `adafactor`, or None for gradients as outputs; its
                settings (`lr`, `beta1`, `eps`, `decay`), and `clip`, the norm to which all gradients together are
                scaled down, are fields, too; `lr="input"` and `decay="input"` are inputs of a step, as schedules want.
                `loss_scale`, a number or "input", scales the loss for the backward pass, and gradients back in f32.
            dtype: Of parameters and of what is computed; moments of an optimizer are f32 or wider.
            precision: Instead of a dtype a recipe: `fp32`; `bf16` or `fp16`, in which the optimizer updates `w.master`
                in f32, and a parameter w is that, rounded; or `fp8`, as bf16 but for layers' products.
            ignore: Keys of the config that no builder computes, and that may be left out; others are refused.
            fields: `batch`, and the sizes of the family, named as in presets.

        Raises `ShardplanError` naming the legal presets, families and fields.

        >>> model = Model.load("gpt", layers=2, hidden=12, heads=3, seq=5, vocab=17, optimizer="sgd")
        >>> model.parameter_count, model.dims["layers.q"], model.replaced["layers.q"]
        (4056, ('layer', 'hidden', 'kv_heads', 'ratio', 'head'), 'next.layers.q')
        """
        validation.text("Model.load: the name of a model", name, ShardplanError)
        known = presets()
        if name not in known and is_config(name):
            read = load_config(name, ignore)
            more: dict[str, Any] = {"dtype": dtype, "precision": precision, **read.fields, **fields}
            return Model.load(read.family, training=training, optimizer=optimizer, **more)
        if ignore:
            raise ShardplanError(f"Model.load: ignore={excerpt(ignore)} of {name}, which is no config; legal is none")
        if name not in known and name not in _FAMILIES:
            raise ShardplanError(
                f"Model.load: {excerpt(name)} is no preset and no family{near_text(name, (*known, *_FAMILIES), 3)}; "
                f"legal is one of {len(known)} presets, which docs/models.md lists, or a family: {', '.join(_FAMILIES)}"
            )
        validation.flag("Model.load: training", training, ShardplanError)
        if optimizer == "":
            optimizer = "adamw" if training else None
        if optimizer is not None:
            validation.choice("Model.load: optimizer", optimizer, tuple(OPTIMIZERS), ShardplanError)
            if not training:
                raise ShardplanError(f"Model.load: optimizer={optimizer!r} without training; legal is None")
        legal = OPTIMIZERS[optimizer].fields if optimizer else {}
        settings = OPTIMIZERS[optimizer].read("Model.load", fields) if optimizer else {}
        given = dict(known.get(name, {"family": name})) | {k: v for k, v in fields.items() if k not in settings}
        sizes = _sizes(name, given, fields, tuple(legal))
        if (recipe := recipe_of("Model.load: precision", precision)) is not None:
            dtype = recipe.dtype
        kind = validation.choice("Model.load: dtype", short_name(dtype), ("f16", "bf16", "f32", "f64"), ShardplanError)
        said = {"training": training, "optimizer": optimizer, "dtype": kind}
        return _build_model(name, sizes, said | ({"precision": precision} if precision else {}), settings)

    @staticmethod
    def of(
        program: Program,
        dims: Mapping[str, Iterable[str]],
        parameters: Iterable[str],
        *,
        name: str = "model",
        optimizer: str | None = None,
        training: bool = True,
        **settings: float,
    ) -> Model:
        """Make a model of a forward program on one device.

        Args:
            program: Its output `loss` is a scalar where it trains.
            dims: The names of the dims of every input.
            parameters: The inputs that are parameters, and train.
            name: What it is called.
            optimizer: `sgd`, `adamw`, `adafactor`, or None for gradients as outputs.
            training: Whether it is a training step, or the program alone.
            settings: Those of the optimizer.

        Raises `ShardplanError` for names that do not fit the inputs.
        """
        types = dict(program.inputs)
        found = {key: tuple(names) for key, names in dims.items()}
        for key, t in program.inputs:
            if len(found.get(key, ())) != t.ndim:
                said = excerpt(found.get(key))
                raise ShardplanError(f"Model.of: the dims of {key}, {t}, are {said}; legal are {t.ndim} names")
        owned = {
            key: Parameter(tuple(zip(found[key], types[key].shape, strict=True)), key, " ".join(found[key]))
            for key in validation.names("Model.of: parameters", tuple(parameters))
        }
        fields = {"training": training, "optimizer": optimizer, "dtype": types[next(iter(owned))].dtype, **settings}
        return assemble_model(name, program, found, owned, {}, fields, settings)

    def with_precision(self, precision: str) -> Model:
        """Return the model under a recipe, as `load` has it.

        Raises `ShardplanError` for a model made of a program of another dtype.
        """
        recipe, was = (recipe_of("precision", name) for name in (precision, self.fields.get("precision")))
        assert recipe is not None
        fields: dict[str, Any] = {**self.fields, "precision": precision}
        if self._is_loaded():
            return Model.load(self.name, **fields)
        made = "8 bits" if was and was.narrow and not recipe.narrow else self.fields["dtype"]
        if made != recipe.dtype or self.forward is None:
            legal = f"legal is one in {recipe.dtype}"
            raise ShardplanError(f"precision={precision!r} of {self.name}, a program in {made}; {legal}")
        return _remade(self, self.forward, fields)

    def _is_loaded(self) -> bool:
        return "family" in presets().get(self.name, {}) or self.name in _FAMILIES

    def resize(self, **sizes: int) -> Model:
        """Return the model with another `batch`, `seq`, `cache` or other size that no parameter has.

        Of a model made of a program the sizes are those of its inputs' dims by their names (`seq` is `sequence`, too):
        every shape is derived again from the factors of the ops.

        Raises `ShardplanError` naming a parameter that would change; and of a program the step that hides a size.
        """
        asked = {
            name: validation.whole_number(f"resize of {self.name}: {name}", n, 1, kind=ShardplanError)
            for name, n in sizes.items()
        }
        if not self._is_loaded():
            return self._with_dims({"sequence" if name == "seq" else name: n for name, n in asked.items()})
        fields: dict[str, Any] = {**self.fields, **asked}
        found = Model.load(self.name, **fields)
        for name, p in self.parameters.items():
            if found.parameters.get(name) != p:
                text = ", ".join(f"{key}={value}" for key, value in asked.items())
                raise ShardplanError(f"resize of {self.name}: {text} changes the parameter {name}; load it with that")
        return found

    def _with_dims(self, asked: Mapping[str, int]) -> Model:
        """The model, which was made of a program, with other sizes of some dims."""
        program = self.forward or self.program
        made = with_sizes(f"resize of {self.name}", program, self.dims, self.parameters, self.constants, asked)
        return _remade(self, made, self.fields)

    def with_given_count(self) -> Model:
        """Return the model as jobs run it: how many targets of a step count is an input of it (`target_counts`)."""
        program = self.forward or self.program
        found = take_count_as_input(program) if self.fields["training"] else program
        return self if found is program else _remade(self, found, self.fields)

    @property
    def parameter_count(self) -> int:
        """The number of elements of all parameters."""
        return sum(p.size for p in self.parameters.values())

    def pack(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the parameters as inputs of the program, from the tensors of a checkpoint by their names there.

        Constants, which an import's source has, are beside them; one of a checkpoint takes the place of its own.
        Raises `LayoutError` for a tensor that is missing, of another shape, or of no parameter.
        """
        given = validation.table("a checkpoint", arrays, "names to arrays")
        used: set[str] = {n for n in given if n in self.constants} | self.spare
        found: dict[str, Array] = {}
        for value, array in self.constants.items():
            found[value] = np.asarray(given.get(value, array))
            if found[value].shape != array.shape:
                raise LayoutError(f"{value} of a checkpoint has the shape {found[value].shape}; legal is {array.shape}")
        for value, p in self.parameters.items():
            out = found[value] = np.empty(p.shape, numpy_dtype(self.program.types[value].dtype))
            for index, name in p.names():
                if name not in given:
                    raise LayoutError(f"a checkpoint of {self.name} without {name}, which is in the parameter {value}")
                out[index] = p.view(np.asarray(given[name]), name)
                used.add(name)
        if more := sorted(given.keys() - used):
            text = f"a checkpoint of {self.name} with {more[0]}, of no parameter{near_text(more[0], used)}"
            raise LayoutError(text)
        return found

    def unpack(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the tensors of a checkpoint, from values of parameters by their names in the program.

        Parameters may be left out where all that shares a tensor with them is. Raises `LayoutError` for another name.
        """
        given = validation.table("parameters", values, "names to arrays")
        for value in given:
            if value not in self.parameters:
                raise LayoutError(
                    f"{self.name} has no parameter {excerpt(value)}{near_text(str(value), self.parameters)}"
                )
        found: dict[str, Array] = {}
        filled: dict[str, int] = {}
        for value, array in given.items():
            p, array = self.parameters[value], np.asarray(array)
            if array.shape != p.shape:
                raise LayoutError(f"the parameter {value} has the shape {array.shape}; legal is {p.shape}")
            for index, name in p.names():
                stored = found.setdefault(name, np.empty(p.stored_shape, array.dtype))
                view = p.view(stored, name)
                view[...] = array[index]
                filled[name] = filled.get(name, 0) + view.size
        for name, array in found.items():
            if filled[name] != array.size:
                raise LayoutError(f"{name} of the checkpoint is in several parameters; legal are all of them or none")
        return found

    def state(self, parameters: Mapping[str, Array] | None = None) -> dict[str, Array]:
        """Return what replaced inputs are at first, but for parameters: zeros, and copies of `parameters` in f32.

        Those it takes where there are such copies; raises `ShardplanError` for one that is missing.
        """
        types = self.program.types
        names = [name for name in self.replaced if name not in self.parameters]
        found = {name: np.zeros(types[name].shape, numpy_dtype(types[name].dtype)) for name in names}
        for name in names:
            of, _, part = name.rpartition(".")
            if of in self.parameters and part == MASTER:
                if of not in (parameters or {}):
                    raise ShardplanError(f"state of {self.name}: no parameter {of}, of which {name} is a copy in f32")
                found[name][...] = np.asarray(parameters[of])  # type: ignore[index]
        return found

    def __str__(self) -> str:
        """Return inputs and outputs, and a line for each parameter: its dims, and its name in a checkpoint."""
        kind = f"training with {self.fields['optimizer'] or 'gradients'}" if self.fields["training"] else "forward"
        lines = [f"{self.name}: {self.parameter_count:,} parameters in {self.fields['dtype']}, {kind}"]
        inside = self.parameters.keys()
        data = [n for n in self.dims if n not in inside and n.rpartition(".")[0] not in inside]
        lines.append(f"  inputs: {', '.join(n + self._shape(n) for n in data)}")
        rows = [(n, self._shape(n), p.file) for n, p in self.parameters.items()]
        widths = [max(len(row[k]) for row in rows) for k in (0, 1)]
        lines += [f"  {n:<{widths[0]}}  {shape:<{widths[1]}}  {file}" for n, shape, file in rows]
        of_inputs = {*self.replaced.values(), *self.gradients.values()}
        made = ", ".join(o for o in self.program.outputs if o not in of_inputs)
        return "\n".join([*lines, f"  outputs: {made}"])

    def __repr__(self) -> str:
        """Show the text."""
        return f"<Model\n{self}>"

    def _shape(self, name: str) -> str:
        pairs = zip(self.dims[name], self.program.types[name].shape, strict=True)
        return f"[{' '.join(f'{dim}={n}' for dim, n in pairs)}]"


def _remade(model: Model, forward: Program, fields: Mapping[str, Any]) -> Model:
    """A model that was made of a program, of another one with its inputs, or under other fields."""
    known = OPTIMIZERS[fields["optimizer"]].fields if fields["optimizer"] else {}
    dims, settings = (
        {key: model.dims.get(key, ()) for key, _ in forward.inputs},
        {k: fields[k] for k in known if k in fields},
    )
    made = assemble_model(model.name, forward, dims, model.parameters, {}, fields, settings)
    return dataclasses.replace(made, constants=model.constants, constraints=model.constraints, spare=model.spare)


def _sizes(name: str, given: Mapping[str, Any], asked: Iterable[str], settings: tuple[str, ...]) -> Any:
    """The sizes that fields say; raises `ShardplanError` for one that the family does not have, or lacks."""
    kind, _ = _FAMILIES[given["family"]]
    known = {f.name: f for f in dataclasses.fields(kind)}
    legal = [*(n for n in known if n not in ("family", "source")), *settings]
    for key in asked:
        if key not in legal:
            near = near_text(key, legal)
            raise ShardplanError(f"Model.load: {name} has no field {key!r}{near}; legal are {', '.join(legal)}")
    if lacking := [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in given]:
        raise ShardplanError(f"Model.load: {name} lacks {', '.join(lacking)}, which have no default")
    return kind(**given)


def _build_model(name: str, sizes: Any, said: Mapping[str, Any], settings: Mapping[str, float]) -> Model:
    """Write the program of some sizes."""
    scope = Scope(said["dtype"])
    _, write = _FAMILIES[sizes.family]
    write(scope, sizes, said["training"])
    replaced = {key: f"next.{key}" for key in scope.replaced}
    results = sorted(scope.results.items(), key=lambda item: "." in item[0])  # those of the whole model come first
    names = {value: key for key, value in results} | {v: replaced[k] for k, v in scope.replaced.items()}
    program = rename_values(scope.program([value for _, value in results] + [*scope.replaced.values()]), names)
    dims = {key: tuple(found) for key, found in scope.inputs.items()}
    fields = {**said, **settings, **dataclasses.asdict(sizes)}
    said = {key: value for key, value in fields.items() if key not in ("family", "source")}
    return assemble_model(name, program, dims, scope.parameters, replaced, said, settings)


def assemble_model(
    name: str,
    program: Program,
    dims: Mapping[str, tuple[str, ...]],
    parameters: Mapping[str, Parameter],
    replaced: Mapping[str, str],
    fields: Mapping[str, Any],
    settings: Mapping[str, float],
) -> Model:
    """A model of a forward program."""
    recipe = recipe_of("precision", fields.get("precision"))
    program = narrow_products(name, program, parameters) if recipe and recipe.narrow else program
    made, names = Training(program, {}, dict(replaced), ()), dict(dims)
    if fields["training"]:
        wanted = {key: p for key, p in parameters.items() if p.trained}
        made = training_program(program, wanted, fields["optimizer"], settings, master=bool(recipe and recipe.master))
        # What an optimizer keeps of a parameter has its dims; the number of the step has none.
        names |= {key: names.get(key.rpartition(".")[0], ()) for key, _ in made.program.inputs if key not in names}
    return Model(
        name,
        made.program,
        MappingProxyType(dict(fields)),
        MappingProxyType(names),
        MappingProxyType(dict(parameters)),
        MappingProxyType(made.gradients),
        MappingProxyType(made.replaced),
        made.origins,
        program,
    )
