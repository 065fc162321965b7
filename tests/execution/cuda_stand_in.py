"""Ranks whose CUDA tensors and whose libraries are stand-ins: what a rank posts, with no GPU and no other rank.

torch itself makes the process group, as it would on a machine with GPUs, but for its libraries, which are its own
`fake` one: `nccl` and `gloo` are known by name and move nothing. Tensors are fake: they have a device and no bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # what c10d's ops are on fake tensors
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardplan.execution.torch import run
from shardplan.execution.torch.group_state import group_state
from shardplan.execution.torch.wire import TorchWire

WAYS = ("nccl", None, "cuda:nccl,cpu:gloo")  # of making the process group; None: no library is named


class Post(NamedTuple):
    """What reached a process group."""

    op: str  # of c10d
    ranks: tuple[int, ...]  # of the group, in member order
    device: str  # of the tensors
    nbytes: int  # of the tensors, together
    peer: int = -1  # of a message, else -1
    tag: int = -1


class _Library(type):
    """Makes the fake library wherever torch makes, or looks for, one of another name."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, FakeProcessGroup)

    def __call__(cls, store: Any, rank: int, size: int, *rest: Any, **more: Any) -> Any:
        return FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())


class _Named(metaclass=_Library):
    class Options:
        pass


class _Posts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.posts: list[Post] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            flat = tree_leaves((args, kwargs))
            group = next(dist.ProcessGroup.unbox(x) for x in flat if isinstance(x, torch.ScriptObject))
            tensors = [x for x in flat if isinstance(x, torch.Tensor)]
            ranks = tuple(dist.get_process_group_ranks(group))
            name = func._schema.name.removeprefix("c10d::").strip("_")
            (kind,) = {x.device.type for x in tensors}
            to = (ranks[args[2]], args[3]) if name in ("send", "recv") else ()
            self.posts.append(Post(name, ranks, kind, sum(x.nbytes for x in tensors), *to))
        return func(*args, **(kwargs or {}))


def _part(x: Any, key: Any) -> Any:
    """Index a fake tensor."""
    if isinstance(key, int):
        return x.select(0, key)
    start, stop, _ = key.indices(len(x))
    return x.narrow(0, start, stop - start)


def _copied(x: Any, source: Any) -> Any:
    return torch.ops.aten.copy_.default(x, source)


@contextmanager
def rank_of(way: str | None, rank: int, ranks: int) -> Iterator[list[Post]]:
    """Be one of so many ranks of a process group made in that way; yields what it posts inside, as it comes."""
    c10d = dist.distributed_c10d
    options = patch.object(FakeProcessGroup, "options", _Named.Options(), create=True)
    known = patch.multiple(
        c10d, is_nccl_available=lambda: True, ProcessGroupNCCL=_Named, ProcessGroupGloo=_Named, create=True
    )
    numbered = patch.object(FakeProcessGroup, "_set_sequence_number_for_group", lambda self: None)
    accelerator = patch.object(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
    straight = patch.object(run, "on_stream", lambda running: running)  # there is no stream
    alone = patch.multiple(TorchWire, exchange_posts=lambda *_: None, compare_posts=lambda *_: None)
    # Both as Python calls them ask for the GPU.
    indexed = patch.multiple(FakeTensor, __getitem__=_part, copy_=_copied, create=True)
    with indexed, known, numbered, accelerator, options, straight, alone:
        dist.init_process_group(way, rank=rank, world_size=ranks, store=dist.HashStore())
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), _Posts() as seen:
                yield seen.posts
        finally:
            group_state().end()
            dist.destroy_process_group()


def known(*programs: Any) -> None:
    """Have this rank believe that all others have come with its programs: nobody answers in the store."""
    state = group_state()
    for bound in programs:
        state.agreed |= {f"{bound.digest}{more}" for more in ("", "@cuda", "@cpu")}
