"""A server's weight-transfer engine, and the trainer's end of it, over `Refit`: plain dicts on the control plane.

The shape is that of vLLM's `WeightTransferEngine` (init_transfer_engine, receive_weights, finish_weight_update) and of
SGLang's update_weights_from_distributed: an engine subclass is three calls, and no framework is needed here. The
trainer says its side as text; the server knows only its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardplan.errors import BackendError, LayoutError, excerpt
from shardplan.interop.torch.refit.handle import TIMEOUT, Refit
from shardplan.interop.torch.refit.meeting import close_store, store_of
from shardplan.movement.weights.drops import left_out
from shardplan.movement.weights.refit import refit
from shardplan.movement.weights.weights import Weights

INFO = ("version", "source", "target", "store", "memory_limit", "timeout", "drop", "differ")


def transfer_info(
    source: Weights,
    target: Weights,
    store: str,
    memory_limit: int | None = None,
    timeout: float = TIMEOUT,
    drop: Iterable[str] = (),
    differ: Iterable[str] = (),
) -> dict[str, Any]:
    """Return what a control plane carries to every rank of both sides: a dict of texts and numbers.

    Args:
        source: how the trainer stores the model.
        target: how the server does.
        store: where all ranks meet, as text; see `Refit`.
        memory_limit: the bytes that a rank may allocate beyond its parameters; None for no limit.
        timeout: seconds that any wait may take.
        drop: what of the trainer's the server need not take, as of `shardplan.refit`.
        differ: fields in which the configs may differ, likewise.
    """
    said = (1, str(source), str(target), store, memory_limit, timeout, list(drop), list(differ))
    return dict(zip(INFO, said, strict=True))


class TransferEngine:
    """One rank's end of a weight transfer: of a server's worker, or of a trainer's process.

    >>> from shardplan.movement.weights.weights import Weights
    >>> import torch
    >>> config = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...           "num_hidden_layers": 1, "vocab_size": 64, "torch_dtype": "float32"}
    >>> side = Weights.load("vllm-llama", config)
    >>> made = {name: torch.zeros(shape) for name, shape, _ in side.parameters(0)}
    >>> TransferEngine(made, rank=0).update_weights()
    Traceback (most recent call last):
        ...
    shardplan.errors.BackendError: update_weights before init; legal is init with what transfer_info returns
    """

    def __init__(self, model: Any, rank: int, finish: Callable[[Any], object] | None = None) -> None:
        """Take the live model of this rank, its device id, and the engine's own processing after loading."""
        self.model, self.rank, self._processing = model, rank, finish
        self._info: dict[str, Any] | None = None
        self._store: Any = None
        self._handles: dict[tuple[str, ...] | None, Refit] = {}
        self._open = False  # whether weights came that `finish` has not processed

    def init(self, info: Mapping[str, Any]) -> None:
        """Take what `transfer_info` returned; raises `LayoutError` where that is not what it is."""
        unknown = [k for k in info if k not in INFO] or [k for k in INFO[:4] if k not in info]
        if unknown or info["version"] != 1:
            raise LayoutError(f"init of {excerpt(dict(info))}; legal is what transfer_info returns")
        self.close()
        self._info = dict(info)

    def update_weights(self, names: Iterable[str] | None = None, version: int | None = None) -> int:
        """Move weights, collectively with all ranks of both sides, and return the version.

        Args:
            names: logical tensors or parameters of the target, as patterns; None for all. A choice of names is planned
                when it first comes, and kept.
            version: a number for what comes; None on ranks that leave it to others.

        Raises as `Refit` does, and `BackendError` before `init`.
        """
        if self._info is None:
            raise BackendError("update_weights before init; legal is init with what transfer_info returns")
        chosen = None if names is None else tuple(sorted(set(names)))
        if chosen not in self._handles:
            self._handles[chosen] = self._handle(self._info, chosen)
        found = self._handles[chosen](version)
        self._open = True
        return found

    def finish(self) -> int:
        """Run the engine's own processing on what came, and return the version that may be served from now on."""
        found = self._any_handle().serve()
        if self._open and self._processing is not None:
            self._processing(self.model)
        self._open = False
        return found

    def serve(self) -> int:
        """Return the version; raises `BackendError` before `finish`, and after a transfer that failed."""
        found = self._any_handle().serve()
        if self._open:
            raise BackendError(f"version {found} is not served: it is not finished; legal is to call finish first")
        return found

    def close(self) -> None:
        """End the process groups, and give staging back."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
        if self._info is not None and isinstance(self._info["store"], str):
            close_store(self._store)
        self._info = self._store = None

    def _any_handle(self) -> Refit:
        if not self._handles:
            raise BackendError("no weights have come; legal is update_weights first")
        return next(iter(self._handles.values()))

    def _handle(self, info: Mapping[str, Any], only: tuple[str, ...] | None) -> Refit:
        source, target = Weights.parse(info["source"]), Weights.parse(info["target"])
        out = left_out(source, target, only)  # a choice of names leaves out less
        drop = [left.tensor for left in out if any(left.matches(p) for p in info.get("drop") or ())]
        plan = refit(source, target, None, info.get("memory_limit"), only, drop=drop, differ=info.get("differ") or ())
        timeout = float(info.get("timeout") or TIMEOUT)
        if self._store is None:
            self._store = store_of(info["store"], plan.ranks, self.rank, timeout)
        name = f"transfer {hashlib.sha256(repr(only).encode()).hexdigest()[:8]}"
        return Refit(plan, self.model, rank=self.rank, store=self._store, timeout=timeout, name=name)
