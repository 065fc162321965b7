"""Reduction programs for torch.distributed: bound to process groups, and as text to paste.

Both make the calls of `torch_calls`: the framework's own collectives on one process group for each group of the
program. Device ids are global ranks. Unlike `execution.torch.run`, which moves parts itself so that every sum comes out
in one order, this leaves the algorithm of a collective to the backend (nccl, gloo), as a training script would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardplan.core.program import Program
from shardplan.errors import BackendError, optional
from shardplan.hardware.placement import Placement
from shardplan.interop.exports.recipe import Recipe, recipe
from shardplan.interop.exports.template import Template, source_after_docstring

if TYPE_CHECKING:
    import torch

MODULE = '''"""A reduction with torch.distributed, exported by shardplan. Ranks are global ranks.

$heading

Every rank of the world calls `groups = make_groups(GROUPS, {})` once, after init_process_group, and then
`reduce_payload(payload, groups)` with its own payload, all of one size.
"""

$calls


# The groups of every move, members in the order of the program.
GROUPS = {
$groups}


def reduce_payload(payload: torch.Tensor, groups: dict[str, Group]) -> torch.Tensor:
    x = pad_payload(payload, $cells).reshape($chunks)
$moves    return x.reshape(-1)$cut
'''


def _template_fields(r: Recipe) -> dict[str, str]:
    groups: dict[str, str] = {}  # moves over the same groups share them
    for move in r.moves:
        groups[move.label] = "".join(f"        {ranks},\n" for ranks in r.groups(move))
    rows = (f'    "{label}": [\n{ranks}    ],\n' for label, ranks in groups.items())
    return {"calls": source_after_docstring("torch_calls.py"), "groups": "".join(rows)}


TEMPLATE = Template(
    MODULE,
    _template_fields,
    size="payload.numel()",
    turn="permute",
    zeros="x.new_zeros({shape})",
    all_gather="all_gather(x.reshape(-1), {group})",
)


class TorchReduction:
    """A reduction program on process groups (`recipe` says which); call it with each rank's payload.

    Its device ids are global ranks. `groups` are process groups by the ranks of their members; those missing are made
    and kept there, so several programs that are given one dict share their groups. Every rank of the world makes it,
    with the same program and equal `groups`: torch makes a group on all ranks together.

    Raises `BackendError` for a program that cannot be exported, torch.distributed not initialised, and too few ranks.
    """

    def __init__(self, program: Program, groups: dict[tuple[int, ...], Any] | None = None) -> None:
        """Make the process groups."""
        optional("torch", "torch")
        import torch.distributed as dist

        self.recipe = recipe(program)
        if not dist.is_available() or not dist.is_initialized():
            raise BackendError(
                "torch.distributed is not initialised: launch with torchrun and call "
                "torch.distributed.init_process_group"
            )
        if max(self.recipe.ranks) >= dist.get_world_size():
            raise BackendError(
                f"the program runs on device {max(self.recipe.ranks)}, but there are {dist.get_world_size()} ranks; "
                f"device ids are global ranks"
            )
        module = TEMPLATE.load(program)
        self.groups = module["make_groups"](module["GROUPS"], {} if groups is None else groups)
        self.reduce_payload = module["reduce_payload"]

    def __call__(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the reduced payload, flat; the payload itself is left as it is.

        The payload may have any shape, and has one size on all ranks; the result has as many elements. Where the
        program ends in shards, it is this rank's, padded; where it ends at a root, what other ranks return has no
        meaning.
        """
        return self.reduce_payload(payload, self.groups)


def bind_reduction(program: Program, groups: dict[tuple[int, ...], Any] | None = None) -> TorchReduction:
    """Return a reduction program on process groups, to be called with each rank's payload: see `TorchReduction`."""
    return TorchReduction(program, groups)


def torch_text(program: Program, placement: Placement | None = None) -> str:
    """Return Python source that runs a reduction program with torch.distributed alone; device ids are global ranks.

    It is a module: `make_groups(GROUPS, {})` once on every rank, then `reduce_payload(payload, groups)`. `placement`,
    where the program lies, says the ranks of `GROUPS`. Raises `BackendError` for one that cannot be exported.

    >>> from shardplan.core.mesh import Mesh
    >>> from shardplan.core.ops import AllReduce
    >>> from shardplan.core.step import Step
    >>> from shardplan.core.tensor import TensorType
    >>> t = TensorType("f32", (4, 5), (), Mesh(data=4), partial={"data": "sum"})
    >>> text = torch_text(Program({"0": t}, [Step(AllReduce(("data",)), ("0",), ("1",))], ("1",)))
    >>> print(text[text.index("def reduce_payload"):])
    def reduce_payload(payload: torch.Tensor, groups: dict[str, Group]) -> torch.Tensor:
        x = pad_payload(payload, 4).reshape(4, -1)
        # all_reduce over data: f32[4, 5]
        x = all_reduce(x, groups["data"])
        return x.reshape(-1)[: payload.numel()]
    <BLANKLINE>
    """
    return TEMPLATE.text(program, placement)
