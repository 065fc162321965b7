"""Settings of parameter groups as a destination keeps them: objects of torch beside the tensors, or `common.pt`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardplan.interop.checkpoint.distributed import blob
from shardplan.interop.checkpoint.jobs import CheckpointJob
from shardplan.interop.checkpoint.parameter_groups import (
    carried_groups,
    has_states,
    megatron_settings,
    source_groups,
    source_steps,
    torch_settings,
)
from shardplan.interop.checkpoint.storage_detection import framework_head
from shardplan.plans.plan_file import write_atomic

_FILE = "__settings_0.distcp"


@dataclass(frozen=True, slots=True)
class WrittenSettings:
    """What is to be written: objects by name, what `common.pt` says, and what the destination does not keep."""

    objects: tuple[tuple[str, Any], ...] = ()
    common: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left: tuple[str, ...] = ()

    def write_objects(self, folder: Path) -> list[tuple[str, str, int, int]]:
        """Write the objects to one file; return the name, the file, where it begins and the bytes of each."""
        parts = [(name, blob(value)) for name, value in self.objects]
        if parts:
            write_atomic(folder / _FILE, b"".join(data for _, data in parts))
        rows: list[tuple[str, str, int, int]] = []
        at = 0
        for name, data in parts:
            rows.append((name, _FILE, at, len(data)))
            at += len(data)
        return rows


def written_settings(job: CheckpointJob, ignored: tuple[str, ...] = ()) -> WrittenSettings:
    """Return what of a source's parameter groups goes along with its optimizer's states.

    Raises `LayoutError` for groups that the destination cannot hold, and `ParseError` for what does not read.
    """
    if not has_states(job.plan) or job.delta or (found := source_groups(job.held, ignored)) is None:
        return WrittenSettings()
    found = carried_groups(found, job.plan)
    if not found.settings:
        return WrittenSettings(left=found.left)
    if job.form == "megatron":
        steps = source_steps(job.held)
        common, left = megatron_settings(found, job.plan, found.steps if steps is None else steps)
        return WrittenSettings(common=common, left=left)
    if job.form != "distributed":
        return WrittenSettings(left=(*found.left, "parameter groups, which files of safetensors do not have"))
    flat = framework_head(job.plan.target.table.name) == "torchtitan"
    return WrittenSettings(tuple(torch_settings(found, flat)), left=found.left)
