"""Tensors of a batch in packs, which the same collectives move, and packs in groups that run side by side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from shardplan.core.ops import Op
from shardplan.core.tensor import TensorType

Thing = TypeVar("Thing")


@lru_cache(maxsize=1 << 14)  # asked for again for every room
def shard_bytes(s: TensorType, t: TensorType) -> tuple[int, int]:
    """Return the bytes of the largest shard before and after."""
    return s.local_bytes(), t.local_bytes()


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One tensor: its ends, and the ops planned for it alone."""

    index: int  # in the caller's lists
    source: TensorType
    target: TensorType
    ops: tuple[Op, ...]
    keep: bool  # the source is the caller's: it counts to the end

    @property
    def kind(self) -> tuple[TensorType, tuple[Op, ...], bool]:
        """What decides what it holds: equal for tensors that are interchangeable."""
        return self.source, self.ops, self.keep

    @property
    def growth(self) -> int:
        """Bytes that the largest shard adds to what is live."""
        before, after = shard_bytes(self.source, self.target)
        return after - before * (not self.keep)

    @property
    def size(self) -> int:
        """Bytes of the larger of its two shards."""
        return max(shard_bytes(self.source, self.target))


Pack = Sequence[BatchItem]  # tensors that the same collectives move
Group = Sequence[Pack]  # packs that run side by side
Slot = Sequence[tuple[Pack, int]]  # steps that are posted together: of which packs, and their numbers there


def pack_tensors(ordered: Sequence[BatchItem], room: int | None) -> list[list[BatchItem]]:
    """Group tensors that can share collectives, for their largest shards; shrinking and growing ones apart."""

    def key(i: BatchItem) -> Hashable:
        return i.ops, i.source.dtype, i.source.ndim, i.source.mesh, i.target.mesh, i.growth > 0

    return first_fit(ordered, room, key, lambda i: i.size)


def group_packs(packs: Sequence[Pack], room: int | None) -> list[Group]:
    """Group packs that may run side by side: shrinking ones, and growing ones behind them."""
    return [*first_fit(packs, room, lambda pack: pack[0].growth > 0, lambda pack: sum(i.size for i in pack))]


def first_fit(
    things: Iterable[Thing], room: int | None, key: Callable[[Thing], Hashable], size: Callable[[Thing], int]
) -> list[list[Thing]]:
    """Group things of equal key, in their order each into the first group with room for it; None: room for all."""
    groups: list[list[Thing]] = []
    index: dict[Hashable, list[int]] = {}
    sizes: list[int] = []
    for thing in things:
        mine, bytes_ = index.setdefault(key(thing), []), size(thing)
        for k in mine:
            if room is None or sizes[k] + bytes_ <= room:
                groups[k].append(thing)
                sizes[k] += bytes_
                break
        else:
            mine.append(len(groups))
            groups.append([thing])
            sizes.append(bytes_)
    return groups
