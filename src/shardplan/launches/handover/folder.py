"""All of a plan in a folder, whole or not at all, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shardplan.errors import ParseError, ShardplanError, line
from shardplan.launches.handover.handed_plan import HandedPlan, WrittenFiles
from shardplan.launches.handover.megatron import write_megatron
from shardplan.launches.handover.scripts import write_scripts
from shardplan.launches.handover.specs import write_jax, write_torch
from shardplan.launches.handover.torchtitan import write_torchtitan
from shardplan.plans.plan_file import write_atomic

WRITERS: Sequence[Callable[[HandedPlan], WrittenFiles]] = (write_torchtitan, write_megatron, write_torch, write_jax)


def check_folder(path: Path) -> None:
    """Raise `ParseError` where a folder cannot be written, before any work is done."""
    if path.exists() and not path.is_dir():
        raise ParseError(f"cannot write {line(path)}: it is a file; legal is a folder, or a new path")
    if not path.parent.is_dir():
        raise ParseError(f"cannot write {line(path)}: there is no folder {line(path.parent)}")


def write_folder(path: Path, plan: HandedPlan) -> list[WrittenFiles]:
    """Write `plan.json`, what each framework gets, and the scripts; return what each got.

    A framework that cannot say a plan at all has the reason as its one line, and no files.
    """
    check_folder(path)
    found: list[WrittenFiles] = []
    for write in WRITERS:
        try:
            found.append(write(plan))
        except ShardplanError as error:
            name = write.__name__.removeprefix("write_")
            found.append(WrittenFiles(name, {}, (f"any of it: {error}",), plan.strategy))
    texts = {"plan.json": plan.to_json(), **write_scripts(plan)}
    texts |= {f"{one.framework}/{name}": text for one in found for name, text in one.files.items()}
    for name, text in texts.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path / name, text.encode())
        if name.endswith(".sh"):
            (path / name).chmod(0o755)
    return found
