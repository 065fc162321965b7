"""The inputs of a model that an optimizer keeps of its parameters: of w they are called w.m, and so on."""

from __future__ import annotations

from fnmatch import fnmatchcase

from shardplan.strategy.model import Model


def is_state_of(model: Model, name: str, parameter: str | None = None) -> bool:
    """Say whether an input is what an optimizer keeps of a parameter, or of one of them."""
    of = name.rpartition(".")[0]
    return of in model.parameters and name not in model.parameters and parameter in (None, of)


def state_names(model: Model, parameter: str) -> tuple[str, ...]:
    """Return what an optimizer keeps of a parameter: by a pattern, where that names nothing else."""
    pattern, names = f"{parameter}.*", tuple(n for n in model.dims if is_state_of(model, n, parameter))
    return (pattern,) if names == tuple(n for n in model.dims if fnmatchcase(n, pattern)) else names
