"""The tensors of a state by name: nested dicts, lists and tuples are walked, and a name is the path joined by dots.

`{"state": {"layers.0.weight": {"exp_avg": x}}}` names `x` state.layers.0.weight.exp_avg; positions in lists and tuples
are numbers, as in `param_groups.0`.
"""

from __future__ import annotations

import copy
import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from shardplan.errors import LayoutError

Path = tuple[Any, ...]  # keys of mappings, and positions in lists and tuples
Layouts = Mapping[str, Sequence[Placement]]  # by name or pattern
MOST_NEAR, LEAST_LIKENESS = 3, 0.3  # names like a pattern that an error shows: patterns are unlike whole names


def name_of(path: Path) -> str:
    """Return the name of what lies at a path."""
    return ".".join(map(str, path))


def leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what is no mapping, list or tuple, with its path, in the order of the state."""
    if isinstance(state, Mapping):
        for key, value in state.items():  # pyright: ignore[reportUnknownVariableType]
            yield from leaves(value, (*path, key))
    elif isinstance(state, (list, tuple)):
        for k, value in enumerate(state):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from leaves(value, (*path, k))
    else:
        yield path, state


def rebuild_state(state: Any, new: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return the state with other values at some paths: containers are copied, whatever else they hold is passed on."""
    if isinstance(state, Mapping):
        made: Any = copy.copy(state) if isinstance(state, MutableMapping) else dict(state)  # pyright: ignore
        for key, value in state.items():  # pyright: ignore[reportUnknownVariableType]
            made[key] = rebuild_state(value, new, (*path, key))
        return made
    if isinstance(state, list):
        made = copy.copy(state)  # pyright: ignore[reportUnknownVariableType]
        made[:] = [rebuild_state(value, new, (*path, k)) for k, value in enumerate(state)]  # pyright: ignore
        return made
    if isinstance(state, tuple):
        items = [rebuild_state(value, new, (*path, k)) for k, value in enumerate(state)]  # pyright: ignore
        return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)  # pyright: ignore
    return new.get(path, state)


def remove(state: Any, paths: Iterable[Path]) -> None:
    """Take what lies at the paths out of the state: out of mappings, and of lists by leaving None in its place."""
    for path in paths:
        holder = state
        for key in path[:-1]:
            holder = holder[key]
        if isinstance(holder, list):
            holder[path[-1]] = None
        else:
            del holder[path[-1]]


def within_tuple(state: Any, paths: Iterable[Path]) -> Path | None:
    """Return the first of the paths whose last step is in a tuple."""
    for path in paths:
        holder = state
        for key in path[:-1]:
            holder = holder[key]
        if isinstance(holder, tuple):
            return path
    return None


def add(state: dict[Any, Any], path: Path, value: Any) -> None:
    """Put in what this rank had not: under the keys of its path, or by its name where these lead through no mapping."""
    holder: Any = state
    for key in path[:-1]:
        holder = holder.setdefault(key, {})
        if not isinstance(holder, MutableMapping):
            state[name_of(path)] = value
            return
    holder[path[-1]] = value


def layout_for(name: str, layouts: Layouts) -> Sequence[Placement] | None:
    """Return the placements of the first name or pattern that matches."""
    return next((p for pattern, p in layouts.items() if fnmatch.fnmatchcase(name, pattern)), None)


def matching(layouts: Layouts, names: Iterable[str]) -> dict[str, str]:
    """Return the first of the names that each pattern matches, of the patterns that match any."""
    names = list(names)
    found = {p: next((n for n in names if fnmatch.fnmatchcase(n, p)), None) for p in layouts}
    return {pattern: name for pattern, name in found.items() if name is not None}


def unmatched_error(pattern: str, names: Iterable[str], plain: str | None) -> LayoutError:
    """Return the error of a pattern without a tensor to lay out; `plain` is what it matches that is no DTensor."""
    if plain is not None:
        return LayoutError(f"layouts: {pattern!r} matches no DTensor, only {plain}, which is passed on as it is")
    names = sorted(set(names))
    near = difflib.get_close_matches(pattern, names, n=MOST_NEAR, cutoff=LEAST_LIKENESS) or names[:MOST_NEAR]
    legal = f"near it are {', '.join(near)}" if near else "the state has no DTensors"
    return LayoutError(f"layouts: {pattern!r} matches none of the {len(names)} DTensors of the state; {legal}")
