"""Reduction programs for MPI: bound to communicators, and as text to paste.

Both make the calls of `mpi_calls`: the library's own Allreduce, Reduce_scatter_block, Allgather, Reduce and
Bcast on communicators that `Split(color, key=position)` makes. Device ids are ranks of the world. Unlike
`execution.mpi.run`, which moves parts itself so that every sum comes out in one order, this leaves the algorithm
to MPI.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardplan.core.program import Program
from shardplan.errors import BackendError
from shardplan.execution.mpi.world import start
from shardplan.hardware.placement import Placement
from shardplan.interop.exports.recipe import Recipe, recipe
from shardplan.interop.exports.template import Template, ids_text, source_after_docstring

MODULE = '''"""A reduction with MPI, exported by shardplan. Ranks are those of the world.

$heading

Every rank calls `groups = make_groups(MOVES, SIZES, RANKS, MPI.COMM_WORLD)` once, and then
`reduce_payload(payload, groups)` with its own payload, all of one size.
"""

$calls


SIZES = $sizes  # of $names
RANKS = $ranks  # of the mesh, row-major over these
# By move: the digits of a place that vary in a group, and those that are 0 in a group that takes part.
MOVES = {
$groups}


def reduce_payload(payload: np.ndarray, groups: dict[str, Any]) -> np.ndarray:
    x = pad_payload(payload, $cells).reshape($chunks)
$moves    return x.reshape(-1)$cut
'''


def _template_fields(r: Recipe) -> dict[str, str]:
    at, ids = r.names.index, ids_text(r.ranks)
    groups = {move.label: ([at(x) for x in move.axes], [at(x) for x in move.masters]) for move in r.moves}
    return {
        "calls": source_after_docstring("mpi_calls.py"),
        "sizes": str(list(r.sizes)),
        "names": ", ".join(r.names),
        "ranks": f"list({ids})" if ids.startswith("range") else ids,
        "groups": "".join(f'    "{label}": {digits},\n' for label, digits in groups.items()),
    }


TEMPLATE = Template(
    MODULE, _template_fields, size="payload.size", turn="transpose", zeros="np.zeros(({shape}), x.dtype)"
)


class MpiReduction:
    """A reduction program on communicators (`recipe` says which); call it with each rank's payload.

    Its device ids are ranks of `world`, a communicator, `MPI.COMM_WORLD` if none is given. Every rank of `world` makes
    it, with the same program; `free` gives the communicators back. Raises `BackendError` for a program that cannot be
    exported, too few ranks, and no mpi4py or MPI library.
    """

    def __init__(self, program: Program, world: Any = None) -> None:
        """Split the world."""
        start()
        from mpi4py import MPI

        self.recipe = r = recipe(program)
        world = MPI.COMM_WORLD if world is None else world
        if max(r.ranks) >= world.Get_size():
            raise BackendError(
                f"the program runs on device {max(r.ranks)}, but there are {world.Get_size()} ranks; device ids are "
                f"ranks"
            )
        module = TEMPLATE.load(program)
        self.groups = module["make_groups"](*(module[x] for x in ("MOVES", "SIZES", "RANKS")), world)
        self.reduce_payload = module["reduce_payload"]

    def __call__(self, payload: np.ndarray) -> np.ndarray:
        """Return the reduced payload, flat; the payload itself is left as it is.

        The payload may have any shape, has a dtype that MPI knows, and one size on all ranks; the result has as many
        elements. Where the program ends in shards, it is this rank's, padded; where it ends at a root, what other ranks
        return has no meaning.
        """
        return self.reduce_payload(payload, self.groups)

    def free_communicators(self) -> None:
        """Free the communicators; every rank of the world calls it, and the object is of no use after."""
        for group in self.groups.values():
            group.Free()
        self.groups = {}


def bind_reduction(program: Program, world: Any = None) -> MpiReduction:
    """Return a reduction program on communicators, to be called with each rank's payload: see `MpiReduction`."""
    return MpiReduction(program, world)


def mpi_text(program: Program, placement: Placement | None = None) -> str:
    """Return Python source that runs a reduction program with mpi4py alone; device ids are ranks.

    It is a module: `make_groups(MOVES, SIZES, RANKS, world)` once on each rank, then `reduce_payload(payload, groups)`.
    `placement`, where the program lies, says `RANKS`. Raises `BackendError` for one that cannot be exported.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import AllReduce
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> t = TensorType("f32", (4, 5), (), Mesh(data=4), partial={"data": "sum"})
    >>> text = mpi_text(Program({"0": t}, [Step(AllReduce(("data",)), ("0",), ("1",))], ("1",)))
    >>> print(text[text.index("def reduce_payload"):])
    def reduce_payload(payload: np.ndarray, groups: dict[str, Any]) -> np.ndarray:
        x = pad_payload(payload, 4).reshape(4, -1)
        # all_reduce over data: f32[4, 5]
        x = all_reduce(x, groups["data"])
        return x.reshape(-1)[: payload.size]
    <BLANKLINE>
    """
    return TEMPLATE.text(program, placement)
