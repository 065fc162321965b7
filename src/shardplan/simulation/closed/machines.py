"""Parameters of machines that ship, as files: what was fitted, on what, and how well it did on rows held out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from shardplan.core import validation
from shardplan.core.decoding import decode_toml
from shardplan.errors import ParseError, ShardplanError, excerpt
from shardplan.hardware.toml_fields import basic_string, check_keys
from shardplan.hardware.topology import Topology
from shardplan.simulation.closed.chips import FREE, chip_of, common
from shardplan.simulation.closed.parameters import Parameters
from shardplan.strategy.strategy import Strategy

_FILES = Path(__file__).parent / "machines"


@cache
def shipped() -> tuple[str, ...]:
    """Return the presets of topologies whose machines have parameters."""
    return tuple(sorted(path.stem for path in _FILES.glob("*.toml")))


@dataclass(frozen=True, slots=True, eq=False)
class MachineFit:
    """Parameters of a machine, and the joint covariance of the logarithms of those in `names` that were fitted.

    Where there is a `base`, that is the same machine but for its network: all else is as fitted there. `taken` are the
    machines that one without rows is like; () where it has rows.
    """

    parameters: Parameters
    names: tuple[str, ...] = ()
    covariance: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    base: str = ""
    taken: tuple[str, ...] = ()
    is_measured: bool = True


@cache
def shipped_fit(name: str) -> MachineFit:
    """Return what ships of a machine; its name is one of `shipped`."""
    return parse_fit((_FILES / f"{name}.toml").read_text(), f"{name}.toml")


def machine_fit(name: str) -> MachineFit:
    """Return the fit of a preset's machine; of one without a file what those with its chip have in common.

    Raises `TopologyError` for what is no preset.

    >>> machine_fit("jean-zay-a100-80g").parameters.network < machine_fit("dgx-a100-80g").parameters.network
    True
    >>> machine_fit("p5-efa").taken
    ('dgx-h100', 'dgx-h200', 'grand-teton-h100')
    """
    return machine_of(Topology.load(name)) if name not in shipped() else shipped_fit(name)


@cache
def machine_of(topology: Topology) -> MachineFit:
    """Return the fit of a topology's machine, by its name; else what machines with its chip have in common."""
    if topology.name in shipped():
        return shipped_fit(topology.name)
    return like_fit(topology, {name: shipped_fit(name) for name in shipped()})


def like_fit(topology: Topology, fits: Mapping[str, MachineFit], but: str = "") -> MachineFit:
    """Return a machine of which there are no rows as those of `fits` with its chip, `but` one, suggest it."""
    chip = chip_of(topology)
    mates = {
        name: (fit.parameters, _variances(fit))
        for name, fit in sorted(fits.items())
        if chip and name != but and not fit.base and chip_of(Topology.load(name)) == chip
    }
    parameters, variances = common(chip, mates)
    return MachineFit(parameters, FREE, np.diag(variances), "", tuple(mates), is_measured=False)


def _variances(fit: MachineFit) -> np.ndarray:
    """Of each parameter that may be fitted; one that was not says nothing."""
    own = dict(zip(fit.names, np.diag(fit.covariance), strict=True))
    return np.array([own.get(name, np.inf) for name in FREE])


def of_machine(topology: Topology) -> Parameters:
    """Return the parameters of a topology's machine."""
    return machine_of(topology).parameters


def parse_fit(text: str, what: str = "parameters") -> MachineFit:
    """Read a file of parameters: a table `parameters`, and beside it `machine`, `source` and a table `fit`.

    Raises `ParseError` where it is no TOML, `ShardplanError` for a key or a value that is not legal.
    """
    try:
        data = decode_toml(text)
    except ParseError as error:
        raise ParseError(f"{what} is no TOML: {error}") from None
    check_keys(what, data, ("machine", "base", "source", "parameters", "fit"))
    said = data.get("parameters")
    if not isinstance(said, dict):
        raise ShardplanError(
            f"{what}: parameters is {excerpt(said)}; legal is a table of {', '.join(Parameters.names())}"
        )
    check_keys(f"{what}: parameters", said, Parameters.names())
    values = {k: validation.number(f"{what}: {k}", v, ShardplanError) for k, v in said.items()}
    fit = data.get("fit", {})
    if not isinstance(fit, dict):
        raise ShardplanError(f"{what}: fit is {excerpt(fit)}; legal is a table")
    names, rows = fit.get("names", []), fit.get("covariance", [])
    if not isinstance(names, list) or not all(isinstance(n, str) and n in Parameters.names() for n in names):
        raise ShardplanError(
            f"{what}: fit.names is {excerpt(names)}; legal are some of {', '.join(Parameters.names())}"
        )
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(names) for row in rows):
        raise ShardplanError(f"{what}: fit.covariance is {excerpt(rows)}; legal are rows of {len(names)} numbers")
    if len(rows) != len(names):
        raise ShardplanError(f"{what}: fit.covariance has {len(rows)} rows; legal are {len(names)}, one a name")
    wrong = next((x for row in rows for x in row if not _finite(x)), None)
    if wrong is not None:
        raise ShardplanError(f"{what}: fit.covariance has {excerpt(wrong)}; legal are finite numbers")
    covariance = np.array(rows, dtype=float).reshape(len(names), len(names))
    base = validation.text(f"{what}: base", data.get("base", ""), ShardplanError)
    return MachineFit(Parameters(**values), tuple(names), covariance, base)


def _finite(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < float("inf")  # pyright: ignore[reportArgumentType]


def fit_text(machine: str, source: str, fit: MachineFit, notes: Mapping[str, object]) -> str:
    """Print a fit as a file that `parse_fit` reads back; `notes` are rows, errors and the like."""
    lines = [f"machine = {basic_string(machine)}", f"source = {basic_string(source)}", "[parameters]"]
    if fit.base:
        lines.insert(1, f"base = {basic_string(fit.base)}")
    plain = Parameters()
    for name in Parameters.names():
        value = getattr(fit.parameters, name)
        if name in fit.names or value != getattr(plain, name):
            lines.append(f"{name} = {value!r}")
    lines += ["[fit]", *(f"{name} = {value!r}" for name, value in notes.items())]
    lines.append(f"names = [{', '.join(map(basic_string, fit.names))}]")
    rows = (", ".join(f"{x:.4g}" for x in row) for row in fit.covariance)
    lines.append("covariance = [" + ", ".join(f"[{row}]" for row in rows) + "]")
    return "\n".join(lines) + "\n"


def check_topology_size(asked: str, topology: Topology, strategy: Strategy) -> None:
    """Raise `ShardplanError`, naming what is asked, where a topology has not as many devices as a strategy."""
    if topology.size != strategy.devices:
        raise ShardplanError(
            f"{asked}: a strategy of {strategy.devices} devices on a topology of {topology.size}; legal is one of "
            f"{strategy.devices}"
        )
