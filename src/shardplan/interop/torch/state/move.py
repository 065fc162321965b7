"""`redistribute_state`: all tensors of a state as one batch plan, on whatever meshes they lie.

The ranks first join what they hold (`view`), so that every rank has the same list of moves; then each makes
the same plans (`plan`) and runs its part. What is wrong on any rank is raised on all of them before
anything moves.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from shardplan.errors import LayoutError, ShardplanError, TimedOut
from shardplan.execution.async_executor import Running, finish
from shardplan.execution.rank_names import format_ranks
from shardplan.execution.run import TIMEOUT
from shardplan.execution.torch.faults import TorchWatch
from shardplan.execution.torch.group_state import group_state
from shardplan.execution.torch.libraries import device_among
from shardplan.execution.torch.objects import all_reduce_object
from shardplan.execution.torch.run import Need, launch, misfit
from shardplan.execution.torch.wire import TorchWire
from shardplan.interop.torch.layout import local_shape, normal, text_of
from shardplan.interop.torch.pending_moves import settle
from shardplan.interop.torch.state.names import (
    Layouts,
    Path,
    add,
    layout_for,
    leaves,
    matching,
    name_of,
    rebuild_state,
    remove,
    within_tuple,
)
from shardplan.interop.torch.state.plan import plan_moves
from shardplan.interop.torch.state.ties import held_elsewhere, local_of, surplus, ties
from shardplan.interop.torch.state.view import (
    Grid,
    Held,
    MovedTensor,
    Source,
    StateView,
    copies,
    digests,
    in_place,
    moved_tensors,
    refuse_unlike,
    same_digests,
)

T = TypeVar("T")
Tensors = dict[Path, DTensor]
SHOWN = 3  # names that a warning lists


def redistribute_state(
    state: Mapping[str, Any],
    layouts: Layouts,
    device_mesh: DeviceMesh | None = None,
    memory_limit: int | None = None,
    *,
    donate: bool = False,
    group: dist.ProcessGroup | None = None,
    topology: Any = None,
    timeout: float = TIMEOUT,
) -> dict[str, Any]:
    """Move all DTensors of a state as one batch plan, equal moves packed into one transfer.

    Args:
        state: DTensors, also in nested dicts, lists and tuples as an optimizer has them; anything else is passed on as
            it is. A name is the path joined by dots: `state.layers.0.weight.exp_avg`, `param_groups.0.scale`. Ranks may
            hold other names, on other meshes: norms on a submesh, the layers of a pipeline's stage. One name on several
            meshes is a tensor on each of them; under a `device_mesh` these are copies of one tensor, and are compared.
        layouts: Placements by name or pattern (as `*.weight`); the first that matches holds, and a tensor that none
            matches is replicated. Each must match a DTensor, of this rank or of another that calls.
        device_mesh: The destination's mesh for all of them, if it is another; without it every tensor stays on its own.
        memory_limit: Bytes on every device for the whole move: sources (to the end, unless they are donated), results
            and staging. Without one a tenth of the results and 64 MiB are staged, or the least that works.
        donate: Free every source as soon as it is not needed: what is moved is taken out of `state` (dicts, and lists,
            which keep None in its place), and must not be used again. A source that something else holds, as the
            parameters of a live model, is not freed: a warning names it, and under a limit it counts to the end.
        group: The ranks that call. Without it those of the meshes in this rank's state; all ranks where a
            `device_mesh` is on others than those. Ranks that would come to unlike answers name the group.
        topology: As of `redistribute`.
        timeout: As of `redistribute`.

    Returns:
        The state with the moved tensors, in the order of `state`; a tensor that is where it belongs is passed on. What
        is one tensor under several names stays one. A tensor that this rank did not have, and whose new mesh it is on,
        is added at the end.

    Raises:
        LayoutError: As `redistribute`, naming the tensor; a pattern that matches nothing, one tensor wanted in two
            layouts, views that overlap, ranks that differ. Every rank raises before anything moves.
        Infeasible: No plan within the limit.
        BackendError, TimedOut: As `redistribute`.
    """
    given: Any = state
    mapping = isinstance(given, Mapping)
    problem: LayoutError | None = None  # of this rank: the others hear of it where they join
    if donate and not isinstance(given, dict):
        problem = LayoutError(f"donate=True empties the state on the way, a {type(given).__name__}; legal is a dict")
    elif not mapping:
        problem = LayoutError(f"redistribute_state takes a mapping of names to tensors, not a {type(given).__name__}")
    settle()  # what follows waits for all ranks, and some may wait for those moves
    tensors: Tensors = {path: x for path, x in leaves(state) if isinstance(x, DTensor)} if mapping else {}
    call = _Call.of(tensors.values(), device_mesh, group, timeout)
    asked = {
        "memory_limit": memory_limit, "donate": donate, "layouts": dict(layouts), "device_mesh": device_mesh,
        "topology": topology,
    }  # fmt: skip
    moving, spare = _agree_moves(call, state, tensors, asked, problem)
    plan = plan_moves(moving, memory_limit, spare, topology)
    own = {(path, Grid.of(x.device_mesh)) for path, x in tensors.items()}
    had = [[key[0] for key in item.keys if key in own] for item in moving]
    sources = [
        local_of(tensors[paths[0]]).detach() if paths else call.empty_stand_in(item)
        for item, paths in zip(moving, had, strict=True)
    ]
    frame = rebuild_state(state, {p: None for paths in had for p in paths})
    tensors.clear()
    if donate:
        remove(state, (p for paths in had for p in paths))
        _tell(moving)
    arriving = [call.rank in Grid.of(item.target.mesh).ranks for item in moving]
    results = plan.run(sources, timeout)
    made = [
        DTensor(local, item.target, requires_grad=False)  # pyright: ignore[reportCallIssue]
        for item, local in zip(moving, results, strict=True)
    ]
    out = rebuild_state(frame, {p: x for paths, x in zip(had, made, strict=True) for p in paths})
    for item, paths, x, arrives in zip(moving, had, made, arriving, strict=True):
        for path in item.paths if arrives else ():
            if path not in paths:
                add(out, path, x)
    return out


class _Joining:
    """What the ranks of a call tell each other, run as a program is; its steps move no tensor."""

    name = "redistribute_state"
    needs: dict[str, Need | None] = {"0": Need((0,), torch.float32, "nothing")}  # noqa: RUF012

    def __init__(self, ranks: tuple[int, ...], rank: int, what: str, value: Any, join: Callable[[Any, Any], Any]):
        """Note what this rank brings; afterwards `value` is what all bring."""
        self.ranks, self.device, self.value, self.join = ranks, rank, value, join
        self.texts = [what]
        self.digest = hashlib.sha256(f"{self.name} {what} {ranks}".encode()).hexdigest()

    def drive(self, values: dict[str, torch.Tensor], wire: TorchWire, watch: TorchWatch, record: Any = None) -> Running:
        """Join; see `TorchExecutable.drive`."""
        watch.begin_step(0)
        self.value = all_reduce_object(wire, self.ranks, self.device, self.value, self.join)
        yield  # all is done: it makes this a generator, as what `launch` runs is
        return []


@dataclass(frozen=True, slots=True)
class _Call:
    """The ranks that make one call, and this one's part in it."""

    ranks: tuple[int, ...]  # ascending
    rank: int
    device: torch.device  # of this rank's shards, and of messages
    timeout: float  # seconds
    named: bool  # whether the caller said who calls

    @staticmethod
    def of(
        tensors: Collection[DTensor], device_mesh: DeviceMesh | None, group: dist.ProcessGroup | None, timeout: float
    ) -> _Call:
        """Find who calls."""
        rank = dist.get_rank()
        if group is not None:
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        else:
            ranks = tuple(sorted({r for x in tensors for r in Grid.of(x.device_mesh).ranks}))
            if device_mesh is not None and set(ranks) != set(Grid.of(device_mesh).ranks):
                ranks = tuple(range(dist.get_world_size()))  # others may bring what goes there, or get what is here
        if rank not in ranks:  # nobody waits for a rank that has nothing
            ranks = (rank,)
        devices = [local_of(x).device for x in tensors]
        kind = "" if device_mesh is None else device_mesh.device_type
        device = devices[0] if devices else device_among(group_state().libraries, kind)
        return _Call(ranks, rank, device, timeout, group is not None)

    def join_values(self, value: T, join: Callable[[T, T], T], what: str) -> T:
        """Return the values of all ranks, joined."""
        if len(self.ranks) == 1:
            return value
        joining = _Joining(self.ranks, self.rank, what, value, join)
        try:
            finish(launch(joining, {"0": torch.empty(0, device=self.device)}, self.timeout))
        except TimedOut as error:
            if self.named:
                raise
            raise TimedOut(
                f"{error}; without group= rank {self.rank} takes it that {format_ranks(self.ranks)} call, by the "
                "meshes of its state: where ranks come to unlike answers, each passes group="
            ) from None
        return joining.value

    def empty_stand_in(self, item: MovedTensor) -> torch.Tensor:
        """Return what stands for a tensor that this rank does not have."""
        assert item.source.tensor_meta is not None
        return torch.empty(0, dtype=item.source.tensor_meta.dtype, device=self.device)


def _agree_moves(
    call: _Call, state: Mapping[str, Any], tensors: Tensors, asked: Mapping[str, Any], problem: LayoutError | None
) -> tuple[tuple[MovedTensor, ...], int]:
    """Return what moves, and the bytes that storages take beyond shards: the same on all ranks; or raise on all."""
    layouts, device_mesh = asked["layouts"], asked["device_mesh"]
    texts = {keyword: " ".join(str(value).split()) for keyword, value in asked.items()}
    own: Exception | None = None
    try:
        if problem is not None:
            raise problem
        view = _local_state_view(state, tensors, asked, texts)
    except Exception as error:  # any: the others wait for what this rank brings
        kind = "" if isinstance(error, ShardplanError) else f"{type(error).__name__}: "
        own, view = error, StateView(texts, error=f"rank {call.rank}: {kind}{error}")
    view = call.join_values(view, StateView.__add__, "what every rank holds")
    if own is not None:
        raise own
    view.check(layouts)
    moving = moved_tensors(view, device_mesh, {Grid.of(x.device_mesh): x.device_mesh for x in tensors.values()})
    copied = copies(moving)
    if copied:
        mine = digests(copied, {path: local_of(x) for path, x in tensors.items()}, call.rank)
        refuse_unlike(call.join_values(mine, same_digests, "digests of copies"))
    return moving, view.surplus


def _local_state_view(
    state: Mapping[str, Any], tensors: Tensors, asked: Mapping[str, Any], texts: Mapping[str, str]
) -> StateView:
    """Return what this rank brings to a move of a state; raises `LayoutError` for what cannot be moved as asked."""
    layouts, device_mesh, donate = asked["layouts"], asked["device_mesh"], asked["donate"]
    names = {path: name_of(path) for path in tensors}
    for name in names.values():
        if list(names.values()).count(name) > 1:
            raise LayoutError(f"two tensors of the state are called {name}; legal is one name for each")
    targets = {path: _target(names[path], x, layouts, device_mesh) for path, x in tensors.items()}
    moved = {path for path, x in tensors.items() if not in_place(x._spec, targets[path])}  # pyright: ignore
    if donate and (stuck := within_tuple(state, moved)):
        raise LayoutError(f"donate=True cannot free {names[stuck]}, which is in a tuple; legal are dicts and lists")
    for path in moved:
        _check_shard(names[path], tensors[path])
    tied = ties(tensors, moved)
    kept = held_elsewhere(tensors, tied) if donate else moved
    sources = {path: Source.of(x._spec) for path, x in tensors.items()}  # pyright: ignore[reportPrivateUsage]
    held = {
        (path, source.grid): Held(source, targets[path].placements, tied[path], path in kept)
        for path, source in sources.items()
    }
    plain = [name_of(p) for p, x in leaves(state) if isinstance(x, torch.Tensor) and p not in tensors]
    spare = surplus([local_of(tensors[path]) for path in dict.fromkeys(tied[path] or path for path in moved)])
    return StateView(texts, held, matching(layouts, names.values()), matching(layouts, plain), spare)


def _check_shard(name: str, x: DTensor) -> None:
    """Raise `LayoutError` where this rank's shard is not what the tensor's spec says."""
    spec, local = x._spec, local_of(x)  # pyright: ignore[reportPrivateUsage]
    try:
        shape = local_shape(spec)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None
    if shape is None or spec.tensor_meta is None:
        return
    need = Need(shape, spec.tensor_meta.dtype, f"{text_of(spec.placements)} of {tuple(spec.shape)}")
    if wrong := misfit(local, need, local.device):
        raise LayoutError(f"{name}: a shard {wrong}")


def _target(name: str, x: DTensor, layouts: Layouts, device_mesh: DeviceMesh | None) -> DTensorSpec:
    """Return the spec that a tensor is to have."""
    spec = x._spec  # pyright: ignore[reportPrivateUsage]
    mesh = device_mesh or spec.mesh
    found: Sequence[Placement] | None = layout_for(name, layouts)
    try:
        wanted = normal([Replicate()] * mesh.ndim if found is None else found, x.ndim, mesh)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from None
    target = DTensorSpec(mesh, wanted, tensor_meta=spec.tensor_meta)
    if masked := next((p for p in spec.placements if isinstance(p, Partial) and type(p) is not Partial), None):
        raise LayoutError(f"{name}: {masked!r} in a state; legal are Shard, Replicate and Partial")
    strange = next((p for p in wanted if isinstance(p, Partial)), None)
    if strange is not None and not in_place(spec, target):
        raise LayoutError(f"{name}: cannot move a tensor of a state to {strange!r}; legal are Shard and Replicate")
    return target


def _tell(moving: Sequence[MovedTensor]) -> None:
    """Warn of donated tensors that are not freed."""
    kept = [item.name for item in moving if item.kept]
    if kept:
        shown = ", ".join(kept[:SHOWN]) + (", ..." if kept[SHOWN:] else "")
        warnings.warn(
            f"redistribute_state: donate=True does not free {len(kept)} of {len(moving)} tensors ({shown}): something "
            "else holds their storage, such as the parameters of a live model; legal is a state that alone holds them",
            stacklevel=3,
        )
