"""Binding: what a rank has by name, compared with what it should have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from shardplan.errors import LayoutError, excerpt

_SHOWN = 3  # of each kind; the error carries all


class WeightsMismatch(LayoutError):
    """Tensors by name are not those of a rank: names `missing` and `additional`, `misshapen` (name, shape, legal)."""

    def __init__(
        self,
        where: str,
        missing: tuple[str, ...],
        additional: tuple[str, ...],
        misshapen: tuple[tuple[str, Any, Any], ...],
    ) -> None:
        """Say how many there are of each kind, and the first."""
        self.missing, self.additional, self.misshapen = missing, additional, misshapen
        said: list[str] = []
        for kind, names in (("missing", missing), ("additional", additional)):
            if names:
                said.append(f"{len(names)} {kind} ({_list_names(names)})")
        if misshapen:
            several = [f"{name} is {list(shape)}, legal is {list(legal)}" for name, shape, legal in misshapen]
            said.append(f"{len(misshapen)} misshapen ({_list_names(several)})")
        super().__init__(f"{where}: {'; '.join(said)}")


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


def check_named(
    legal: Sequence[tuple[str, tuple[int, ...], str]], named: Mapping[str, Any], where: str, spare: Sequence[str] = ()
) -> None:
    """Raise `WeightsMismatch` unless the tensors by name are the legal ones: (name, shape, dtype).

    A name that matches a pattern in `spare` may be there beside them.
    """
    if not isinstance(named, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise LayoutError(f"{where}: the parameters are {excerpt(named)}; legal are tensors by name")
    shapes = {name: shape for name, shape, _ in legal}
    missing = tuple(name for name in shapes if name not in named)
    additional = tuple(
        str(name) for name in named if name not in shapes and not any(fnmatchcase(str(name), p) for p in spare)
    )
    wrong: list[tuple[str, Any, Any]] = []
    for name, shape in shapes.items():
        if name in named:
            found = tuple(int(n) for n in getattr(named[name], "shape", ()))
            if found != shape:
                wrong.append((name, found, shape))
    if missing or additional or wrong:
        raise WeightsMismatch(where, missing, additional, tuple(wrong))
