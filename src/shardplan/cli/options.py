"""What the commands share: options, and how their texts are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardplan.errors import LayoutError, ParseError, line

if TYPE_CHECKING:
    from shardplan.core.mesh import Mesh
    from shardplan.core.tensor import TensorType
    from shardplan.hardware.topology import Topology
    from shardplan.movement.placing.traffic import Traffic

MESH_HELP = "Axes and sizes, major first: data=4,tensor=2; add devices=8:16 or devices=[3,1] for other device ids."
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the picture to FILE.")]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write a report: one file of HTML, light and dark.")
]
Nodes = Annotated[int | None, typer.Option("--nodes", help="The size of the topology's level called node.")]
ALGORITHM_HELP = "auto, or an algorithm or row of the topology's library: ring, 'ring LL', NVLSTree, NCCL_ALGO=Ring."
# NCCL's names that are not ours but for their capitals.
_NCCL_ALGORITHMS = {"nvlstree": "nvls_tree", "collnetdirect": "collnet", "collnetchain": "collnet"}
_PROTOCOLS = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}


def read_algorithm(text: str) -> str:
    """Return the name that a library has for an algorithm; NCCL's variables, and its names in any case, are read too.

    Raises `LayoutError` for a protocol without an algorithm, and for several algorithms.

    >>> read_algorithm("NCCL_ALGO=NVLSTree NCCL_PROTO=Simple"), read_algorithm("Ring LL128"), read_algorithm("auto")
    ('nvls_tree Simple', 'ring LL128', 'auto')
    """
    algorithms: list[str] = []
    protocols: list[str] = []
    for word in text.replace(",", " ").split():
        name = word.removeprefix("NCCL_ALGO=").removeprefix("NCCL_PROTO=").lower()
        if name in _PROTOCOLS:
            protocols.append(_PROTOCOLS[name])
        else:
            algorithms.append(_NCCL_ALGORITHMS.get(name, name))
    if len(algorithms) != 1 or len(protocols) > 1:
        raise LayoutError(
            f"--algorithm {text!r}: legal is one algorithm, with a protocol or without: Ring, 'Ring LL128', "
            "'NCCL_ALGO=Ring NCCL_PROTO=LL128'"
        )
    return " ".join([*algorithms, *protocols])


Algorithm = Annotated[str, typer.Option("--algorithm", help=ALGORITHM_HELP, callback=read_algorithm)]
INSIDE_HELP = "Keep an axis within one unit of a level: tensor=node; several with commas between."
Inside = Annotated[str | None, typer.Option("--inside", metavar="AXIS=LEVEL", help=INSIDE_HELP)]
Hostfile = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="Hosts in the order of ranks, or 'slurm', h[00-03].")
]
RankOrder = Annotated[
    str | None,
    typer.Option("--rank-order", metavar="ORDER", help="block, cyclic, the ranks' devices 0,8,1,.., or a file."),
]
Megatron = Annotated[str | None, typer.Option("--megatron", metavar="ORDER", help="Numbers the ranks: tp-cp-ep-dp-pp.")]
TOPOLOGY_HELP = "A preset, a .toml file or NCCL's .xml file."
TOPOLOGY = ("--topology", "--on")  # either, in every command


def complete_topology(incomplete: str) -> list[str]:
    """Return the presets that a name on its way may become; of none a shell tries files."""
    from shardplan.hardware.topology_file import outside_topologies, presets

    return [name for name in (*presets(), *outside_topologies()) if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    """Return the presets of models that a name on its way may become; of none a shell tries files."""
    from shardplan.strategy.model import presets

    return [name for name in presets() if name.startswith(incomplete)]


NeededTopology = Annotated[
    str, typer.Option(*TOPOLOGY, metavar="NAME|FILE", help=TOPOLOGY_HELP, autocompletion=complete_topology)
]
AnyTopology = Annotated[
    str | None, typer.Option(*TOPOLOGY, metavar="NAME|FILE", help=TOPOLOGY_HELP, autocompletion=complete_topology)
]
PlansTopology = Annotated[
    str | None,
    typer.Option(
        *TOPOLOGY,
        metavar="NAME|FILE",
        help=f"{TOPOLOGY_HELP} By default the plan's.",
        autocompletion=complete_topology,
    ),
]


def read_traffic(text: str) -> tuple[Traffic, tuple[str, ...]]:
    """Return the traffic of a text, and what its bare sizes were taken for, a line each; an error names the option."""
    from shardplan.movement.placing.traffic import usual_calls

    try:
        return usual_calls(text)
    except ParseError as error:
        raise ParseError(f"--traffic: {error}") from None


def read_mesh(option: str, text: str) -> Mesh:
    """Return the mesh that a text says; an error names the option."""
    from shardplan.core.mesh import Mesh

    try:
        return Mesh.parse(text)
    except ParseError as error:
        raise ParseError(f"{option}: {error}") from None
    except LayoutError as error:
        raise LayoutError(f"{option}: {error}") from None
    except OverflowError:
        raise LayoutError(f"{option}: {text!r} is too large") from None


def read_types(text: str, mesh: Mesh) -> list[TensorType]:
    """Return the types of a text, with ';' between several."""
    from shardplan.core.tensor import TensorType

    return [TensorType.parse(part.strip(), mesh) for part in text.split(";")]


def read_topology(name: str | None, nodes: int | None) -> Topology | None:
    """Return a topology with as many nodes; None where none is named."""
    from shardplan.hardware.topology import Topology

    if name is None:
        if nodes is not None:
            raise LayoutError("--nodes sets a size of a topology; give --topology too")
        return None
    return Topology.load(name) if nodes is None else Topology.load(name, nodes=nodes)


def read_bytes(option: str, text: str) -> float:
    """Return the bytes of a text such as 4GB or 64 MiB; an error names the option."""
    from shardplan.hardware.units import parse_bytes

    try:
        return parse_bytes(text)
    except ParseError as error:
        raise ParseError(f"{option}: {error}") from None


def check_writable(*paths: Path | None) -> None:
    """Raise `ParseError` for files that cannot be written, before any work is done."""
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ParseError(f"cannot write {line(path)}: there is no folder {line(path.parent)}")
        if path.is_dir():
            raise ParseError(f"cannot write {line(path)}: it is a folder")


def check_report() -> None:
    """Raise `MissingExtra` where what a report needs is not installed, before any work is done."""
    from shardplan.errors import optional
    from shardplan.report.page.page import EXTRA

    for module in ("jinja2", "plotly.offline"):
        optional(module, EXTRA)
