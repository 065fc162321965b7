"""`StepRow`: a measured training step, one JSON object a line; what a field means, its published tables say.

The schema is that of the rows that `shardplan validate` reads; a field that it does not have is an error of its line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardplan.core.decoding import decode_json, read_bytes
from shardplan.errors import ParseError, line

Status = Literal["verified", "derived", "plot", "recalled", "suspect"]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a row."""


class RowModel(_Struct, frozen=True):
    """What was trained: shapes in elements; `head_dim` and `value_dim` where they are not hidden / heads."""

    family: Literal["gpt", "llama", "moe"]
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated_mlp: bool
    seq: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    head_dim: int | None = None
    value_dim: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    dense_layers: int | None = None
    dense_ffn: int | None = None
    shared_ffn: int | None = None
    router_groups: int | None = None  # of experts, of which a token goes to those of `router_groups_kept` alone
    router_groups_kept: int | None = None


class RowCluster(_Struct, frozen=True):
    """On what: the preset of a topology, the devices used, and those that share the fast links."""

    preset: str
    devices: int
    devices_per_node: int


class RowStrategy(_Struct, frozen=True):
    """How: the fields of `Strategy`; None where it is unpublished."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    microbatch: int | None
    global_batch: int
    interleave: int | None
    schedule: str | None
    recompute: str | None
    sequence_parallel: bool | None
    zero: int | None
    fsdp: bool
    precision: str | None
    attention: str | None = None
    gradient_dtype: str | None = None
    tensor_overlap: bool = False
    offload_layers: int = 0
    shard: int | None = None  # replicas in a row that state is dealt out to; by default all
    context_kind: str | None = None  # where it is not said, see `subject.context_kind_of`
    expert_from: str | None = None  # where it is not said, experts are on neighbours
    imbalance: float | None = None  # tokens of the device of experts that has most, over the mean
    dispatch: str | None = None  # of tokens to experts: `levels`, or `deepep`; `direct`, or `alltoall`
    expert_products: str | None = None
    expert_overlap: bool = False


class RowMeasured(_Struct, frozen=True):
    """What came out: seconds and bytes of the largest device; None where it was not measured."""

    seconds_per_step: float | None = None
    tflops_per_device: float | None = None
    tokens_per_second_per_device: float | None = None
    peak_bytes: float | None = None
    parameter_and_optimizer_bytes: float | None = None
    activation_bytes: float | None = None
    oom: bool | None = None


class StepRow(_Struct, frozen=True):
    """A row: what was run, on what, and what was measured."""

    id: str
    source: str
    status: Status
    model: RowModel
    cluster: RowCluster
    strategy: RowStrategy
    measured: RowMeasured
    notes: str = ""
    assumed: tuple[str, ...] = ()  # what of it its source does not say, and whoever typed it took

    @property
    def table(self) -> str:
        """The part of the id before the slash."""
        return self.id.partition("/")[0]

    @property
    def group(self) -> tuple[Any, ...]:
        """What rows have in common whose plans are ranked against each other."""
        return (
            self.model,
            self.cluster.preset,
            self.strategy.precision,
            self.cluster.devices,
            self.strategy.global_batch,
        )

    @property
    def unknown(self) -> tuple[str, ...]:
        """The fields of its strategy that are unpublished."""
        names = ("microbatch", "interleave", "schedule", "recompute", "sequence_parallel", "zero", "precision")
        return tuple(name for name in names if getattr(self.strategy, name) is None)


def rows_on(rows: Sequence[StepRow], topology: str) -> list[StepRow]:
    """Return rows as of one machine, a preset or a file, whatever they call it."""
    return [msgspec.structs.replace(row, cluster=msgspec.structs.replace(row.cluster, preset=topology)) for row in rows]


def is_steps(path: Path) -> bool:
    """Say whether the first line of a file is a row of a measured step."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return '"strategy"' in file.readline()
    except OSError as error:
        raise ParseError(f"cannot read {line(path)}: {error.strerror}") from None


def read_steps(path: Path) -> list[StepRow]:
    """Return the rows of a file; raises `ParseError` naming the file and the line of what is not a row."""
    rows: list[StepRow] = []
    for number, text in enumerate(read_bytes(path).splitlines(), 1):
        if text.strip():
            try:
                rows.append(decode_json(text, StepRow))
            except ParseError as error:
                raise ParseError(f"{line(path)}, line {number}: {error}") from None
    if not rows:
        raise ParseError(f"{line(path)} has no rows")
    return rows
