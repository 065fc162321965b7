"""Moves that are under way: a result that waits for its move when it is first used, as DTensor's own `async_op` gives.

Started moves are finished in the order of their start, which is the same on every rank: whoever waits for one finishes
those before it, and a move that is not async finishes all of them first. So ranks may wait in any order, and a result
that nobody uses is finished at the next such call, at the latest when the process exits: never by the garbage
collector, which comes at another time on every rank.
"""

from __future__ import annotations

import atexit
import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    _is_view_op,  # pyright: ignore[reportPrivateUsage]
)

from shardplan.execution.async_executor import Running, finish


class _Started:
    """A move after its first messages; afterwards its result, or why there is none."""

    __slots__ = ("error", "result", "running")

    def __init__(self, running: Running) -> None:
        self.running: Running | None = running  # None once somebody drives it to its end
        self.result: torch.Tensor | None = None
        self.error: BaseException | None = None

    def finish(self) -> None:
        """Drive the move to its end; raises what it raises, at every call."""
        running, self.running = self.running, None
        if running is not None:
            try:
                (self.result,) = finish(running)
            except BaseException as error:
                self.error = error
        if self.error is not None:
            raise self.error

    def value(self) -> torch.Tensor:
        """Return the result, after all moves that were started before."""
        while self.running is not None:
            under_way.popleft().finish()
        self.finish()
        assert self.result is not None
        return self.result


under_way: deque[_Started] = deque()  # started and not finished, in the order of their start


def settle() -> None:
    """Finish every move that is under way."""
    while under_way:
        under_way.popleft().finish()


@atexit.register
def _leave() -> None:
    # Others may still need what this rank has to send; without a process group there is nobody to send to.
    try:
        if torch.distributed.is_initialized():
            settle()
    except Exception:  # nobody is left who could use the result
        under_way.clear()


class _Awaited(AsyncCollectiveTensor):
    """What such a tensor has of its own: not where a copy of its attributes finds it, as an async checkpoint makes."""

    __slots__ = ("_done", "_meta", "_value")
    _value: Callable[[], torch.Tensor]
    _done: torch.Tensor | None
    _meta: torch.Tensor


class PendingTensor(_Awaited):
    """The result of a move under way: every use but a view waits for it, and a view is one more such tensor."""

    # `elem` and `completed` of the base become what is worked out on use
    __slots__ = ()

    @staticmethod
    def __new__(
        cls: type[PendingTensor], meta: torch.Tensor, value: Callable[[], torch.Tensor], device: torch.device
    ) -> PendingTensor:
        """Make the tensor of the size, strides and dtype of `meta`, whose value is had by calling `value`."""
        self = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, meta.size(), strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            device=device,
        )  # fmt: skip
        self._value, self._done, self._meta = value, None, meta
        return self

    @property
    def elem(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tensor itself, waited for."""
        if self._done is None:
            self._done = self._value()
            del self._value
        return self._done

    @property
    def completed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it has been waited for."""
        return self._done is not None

    def trigger_wait(self) -> torch.Tensor:
        """Wait, and return the tensor itself."""
        return self.elem

    wait = trigger_wait
    _get_acs_underlying_tensor = trigger_wait

    def data_ptr(self) -> int:
        """Where the tensor itself lies."""
        return self.elem.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the tensor itself."""
        return self.elem.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor itself."""
        return self.elem.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy the tensor itself."""
        return copy.deepcopy(self.elem, memo)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for the operands and run the op; a view of a tensor that is not there yet is taken when it is."""
        x = args[0] if args else None
        if isinstance(x, PendingTensor) and not x.completed and _is_view_op(func):
            shape = func(x._meta, *args[1:], **(kwargs or {}))
            if isinstance(shape, torch.Tensor):
                return PendingTensor(shape, lambda: func(x.elem, *args[1:], **(kwargs or {})), x.device)
        return super().__torch_dispatch__(func, types, args, kwargs)


def wait_for_tensor(local: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of a local tensor, waiting for it if it is the result of an async operation."""
    if isinstance(local, AsyncCollectiveTensor):
        return local.trigger_wait()
    return local


def start_move(running: Running, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Start a move, and return its one result, of this shape and dtype on this device, before it is there.

    It is the result itself if the move needed no waiting, else an `AsyncCollectiveTensor` that waits on first use and
    holds no memory until then.
    """
    try:
        next(running)  # to its first yield: its first messages are under way
    except StopIteration as stop:
        return stop.value[0]
    started = _Started(running)
    under_way.append(started)
    return PendingTensor(torch.empty(tuple(shape), dtype=dtype, device="meta"), started.value, device)
