"""`with_sizes`: the program of a model with other sizes of dims that no parameter has."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardplan.core.dim_names import dim_names
from shardplan.core.program import Program
from shardplan.core.resizing import Sizes, resize_dims
from shardplan.errors import ShardplanError, TypingError, excerpt
from shardplan.strategy.parameter import Parameter


def with_sizes(
    what: str,
    program: Program,
    dims: Mapping[str, tuple[str, ...]],
    parameters: Mapping[str, Parameter],
    constants: Collection[str],
    asked: Mapping[str, int],
) -> Program:
    """Return the program with the sizes that are asked for; every other shape follows from the factors of its ops.

    Args:
        what: What opens every message.
        program: A forward program.
        dims: The names of its inputs' dims.
        parameters: The inputs that keep their sizes.
        constants: Inputs whose values are known.
        asked: Sizes by names of dims.

    Raises `ShardplanError` naming the dim, the parameter, the constant or the step that stands against it.
    """
    found: dict[str, set[int]] = {}
    for key, t in program.inputs:
        for name, n in zip(dims[key], t.shape, strict=True):
            found.setdefault(name, set()).add(n)
    held = {name: key for key, p in reversed([*parameters.items()]) for name, _ in p.dims}
    legal = [name for name, several in found.items() if name not in held and len(several) == 1]
    for name, n in asked.items():
        if name in held:
            raise ShardplanError(f"{what}: {name}={n} changes the parameter {held[name]}; import it with that")
        if name not in legal:
            known = ", ".join(legal) or "none"
            raise ShardplanError(f"{what}: no dim of one size is called {excerpt(name)}; legal are {known}")
    sizes = Sizes({name: n for name in asked for n in found[name]}, asked)
    for key in constants:
        if changed := [name for name in dims[key] if asked.get(name, 0) != sizes.before.get(name, 0)]:
            raise ShardplanError(f"{what}: the constant {key} of the source hides a size, {changed[0]}")
    try:
        return resize_dims(program, dim_names(program, {key: dims[key] for key, _ in program.inputs}), sizes)
    except TypingError as error:
        raise ShardplanError(f"{what}: {error}") from None
