"""The command that lists topologies."""

from __future__ import annotations

from typing import Annotated

import typer

from shardplan.cli.options import TOPOLOGY_HELP, Json, Nodes, read_topology


def topologies(
    name: Annotated[str | None, typer.Argument(metavar="[NAME|FILE]", help=f"Print its text. {TOPOLOGY_HELP}")] = None,
    nodes: Nodes = None,
    as_json: Json = False,
) -> None:
    """List the topologies that ship with shardplan and those that installed packages bring, or print one."""
    from shardplan.hardware.topology import Topology
    from shardplan.hardware.topology_file import outside_topologies, presets
    from shardplan.report.text import json_text
    from shardplan.report.topologies import topologies_object, topologies_text

    one = read_topology(name, nodes)
    found = [Topology.load(every) for every in (*presets(), *outside_topologies())] if one is None else [one]
    if as_json:
        print(json_text(topologies_object(found)))
    else:
        print(topologies_text(found) if one is None else str(one).rstrip("\n"))
