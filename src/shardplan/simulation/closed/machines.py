"""Parameters of machines that ship, as files: what was fitted, on what, and how well it did on rows held out."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from shardplan.core import border
from shardplan.errors import ParseError, ShardplanError, shown
from shardplan.hardware.toml_fields import known
from shardplan.simulation.closed.parameters import Parameters

_FILES = Path(__file__).parent / "machines"


@cache
def shipped() -> tuple[str, ...]:
    """Return the presets of topologies whose machines have parameters."""
    return tuple(sorted(path.stem for path in _FILES.glob("*.toml")))


@cache
def of_machine(name: str) -> Parameters:
    """Return the parameters of a preset's machine; of one without a file those that stand in `Parameters`.

    >>> of_machine("jean-zay-a100-80g").network < of_machine("no such machine").network
    True
    """
    path = _FILES / f"{name}.toml"
    return parse_parameters(path.read_text(), path.name) if name in shipped() else Parameters()


def parse_parameters(text: str, what: str = "parameters") -> Parameters:
    """Read a file of parameters: a table `parameters`, and beside it `machine`, `source` and a table `fit`.

    Raises `ParseError` where it is no TOML, `ShardplanError` for a key or a value that is not legal.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ParseError(f"{what} is no TOML: {error}") from error
    known(what, data, ("machine", "source", "parameters", "fit"))
    said = data.get("parameters")
    if not isinstance(said, dict):
        raise ShardplanError(
            f"{what}: parameters is {shown(said)}; legal is a table of {', '.join(Parameters.names())}"
        )
    known(f"{what}: parameters", said, Parameters.names())
    return Parameters(**{k: border.number(f"{what}: {k}", v, ShardplanError) for k, v in said.items()})
