"""A program of one's own by a text, as commands take it: a file, or `module:function`, which makes what `load` takes.

The function is called without arguments and returns one of: a `Model`; an exported program, a closed jaxpr or an ONNX
model; a torch module with its example, or a function of JAX with its arguments, as a pair; and any but the first with
names of dims behind (`load`'s `names`). Files name no dims: the first of every input is taken for the batch.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardplan.errors import ParseError, ShardplanError, excerpt, line
from shardplan.interop.hlo_trace import HloTrace
from shardplan.interop.importers import load, torch_export
from shardplan.strategy.model import Model

FILES = (".onnx", ".pt2", ".hlo")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_LEGAL = "a Model, a source of load, or a module or function with its example, and names of dims behind"


def is_source(text: str) -> bool:
    """Say whether a text is of a program of one's own: a file that `load` reads, or `module:function`."""
    return Path(text).suffix in FILES or _FUNCTION.fullmatch(text) is not None


def load_source(text: str, *, training: bool = False) -> Model | HloTrace:
    """Return the model of a text, a training step with AdamW where that is asked, or a trace of HLO text.

    Raises `ParseError` for a module or function that there is not, and what `load` raises; what the function raises is
    told in a line.
    """
    settings: dict[str, Any] = {"training": True, "optimizer": "adamw"} if training else {}
    if Path(text).suffix in FILES:
        if training and Path(text).suffix == ".hlo":
            raise ShardplanError(f"{line(text)} is a trace, no model; legal are {FILES[0]} and {FILES[1]}")
        found = load(text, **settings)
        return found if isinstance(found, HloTrace) else _with_batch(text, found, settings)
    made = _called(text)
    if isinstance(made, Model):
        if bool(made.fields["training"]) != training:
            kind = "trains" if made.fields["training"] else "does not train"
            raise ShardplanError(f"{line(text)} returns a model that {kind}; legal is the other kind here")
        return made
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    source, *rest = parts
    names = rest.pop() if rest and _is_names(rest[-1]) else None
    if torch_export.is_module(source) and len(rest) == 1:
        return load(source, rest[0], names, **settings)
    if callable(source) and len(rest) == 1 and isinstance(rest[0], tuple | list):
        from shardplan.errors import optional

        return load(optional("jax", "jax").make_jaxpr(source)(*rest[0]), names, **settings)
    if rest or source is None:
        raise ShardplanError(f"{line(text)} returns {excerpt(made)}; legal is {_LEGAL}")
    return load(source, names, **settings)


def _with_batch(text: str, model: Model, settings: dict[str, Any]) -> Model:
    """The model of a file, which names no dims, with the first of every input as the batch, where that may be."""
    inputs = [name for name, t in (model.forward or model.program).inputs
              if t.ndim and name not in model.parameters and name not in model.constants]  # fmt: skip
    sizes = {model.program.types[name].shape[0] for name in inputs}
    if len(sizes) != 1:
        return model
    names = {name: ("batch", *[None] * (model.program.types[name].ndim - 1)) for name in inputs}
    try:
        return load(text, names, **settings)
    except ShardplanError:
        return model


def _is_names(value: object) -> bool:
    """Whether a value is names of the dims of inputs."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(isinstance(k, str) and isinstance(v, tuple | list) and all(n is None or isinstance(n, str) for n in v)
               for k, v in value.items())  # fmt: skip


def _called(text: str) -> Any:
    """What a function of a module returns; the module may lie where the command is."""
    module, _, name = text.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            raise ParseError(f"{line(text)}: there is no module {error.name}; legal is one that Python finds") from None
        raise ShardplanError(f"{line(text)}: {line(error)}") from None
    except Exception as error:
        raise ShardplanError(f"{line(text)}: the module raises {type(error).__name__}: {line(error)}") from None
    make: Callable[[], Any] | None = getattr(found, name, None)
    if not callable(make):
        raise ParseError(f"{line(text)}: {module} has no function {name}; legal is one without arguments")
    try:
        return make()
    except Exception as error:
        raise ShardplanError(f"{line(text)} raises {type(error).__name__}: {line(error)}") from None
