"""Live bytes of torch storages, counted while a piece of code runs: what an executor really allocates."""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Counts every storage that an op makes, from then until it is freed; `peak` is the most at any time."""

    def __init__(self, *held: Tensor) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self.seen: dict[int, weakref.finalize] = {}
        for x in held:
            self.count(x)

    def count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.seen and self.seen[key].alive:
            return
        size = storage.nbytes()
        self.live += size
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, self.live)
        self.seen[key] = weakref.finalize(storage, self.free, size)

    def free(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.count(x)
        return out


class Made(Storages):
    """Counts the storages that ops make: a view of one that was there, as a mesh's table of ranks, makes none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self.count(x)
        return out
