"""The commands about weights: refit, reshard, apply, diff, derive."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardplan.cli.answers import print_answer
from shardplan.cli.options import (
    AnyTopology,
    Json,
    Nodes,
    Report,
    check_report,
    check_writable,
    read_bytes,
    read_topology,
)
from shardplan.errors import LayoutError, ParseError

if TYPE_CHECKING:
    from shardplan.interop.checkpoint.conversion_sides import AskedConfig
    from shardplan.movement.weights.weights import Weights

SIDE_HELP = "hf, vllm, sglang, megatron, torchtitan, fsdp2, dcp or a table, with degrees: vllm,tp=8"
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The model's config.json, or its folder; else the source's."),
]
Limit = Annotated[str, typer.Option("--memory-limit", metavar="BYTES", help="Bytes in memory at most: 4GB, 512 MiB.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="NAME", help="A tensor that is left out, or a pattern; may be repeated."),
]
Drop = Annotated[
    list[str] | None,
    typer.Option("--drop", metavar="NAME", help="A tensor that may be left out, or a pattern; may be repeated."),
]
Differ = Annotated[
    list[str] | None,
    typer.Option("--differ", metavar="FIELD", help="A field in which the configs may differ: rope_theta; repeatable."),
]
NoReplicas = Annotated[
    bool, typer.Option("--no-replicas", help="Do not compare copies of one element in a checkpoint: take one of them.")
]


def read_side(option: str, text: str, config: Path | None, dtype: str | None, devices: range | None = None) -> Weights:
    """Return the weights that a text says: see `read_weights`; errors name the option."""
    from shardplan.interop.checkpoint.conversion_sides import naming
    from shardplan.movement.weights.weights import read_weights

    with naming(option):
        return read_weights(text, config, devices, dtype)


def _layouts(text: str | None) -> Path | None:
    """Return the path of a file of layouts, None where a text is a table."""
    from shardplan.core.decoding import read_text
    from shardplan.interop.checkpoint.layouts import is_layouts

    if text is None or not text.endswith(".toml") or not Path(text).is_file():
        return None
    said = read_text(text)
    return None if "\n[side]\n" in said else Path(text) if is_layouts(Path(text)) else None


def _set_fields(texts: list[str] | None) -> dict[str, Any]:
    """Return fields of a config by name, of texts such as rope_theta=1e6; raises `ParseError`."""
    out: dict[str, Any] = {}
    for text in texts or ():
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise ParseError(f"--set {text!r}; legal is a field and its value, as rope_theta=1000000")
        try:
            out[key.strip()] = json.loads(value)
        except ValueError:
            out[key.strip()] = value
    return out


def refit(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=f"{SIDE_HELP}, or a text of weights.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Likewise; on the devices after the source's.")],
    config: Config = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="The target's dtype, if it is another.")] = None,
    colocated: Annotated[bool, typer.Option("--colocated", help="The target is on the source's devices.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PATTERN", help="A part of the model; may be repeated.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", metavar="BYTES", help="Of a rank, beyond its parameters: 1GB.")
    ] = None,
    drop: Drop = None,
    differ: Differ = None,
    topology: AnyTopology = None,
    nodes: Nodes = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Plan how a model's weights get from one framework's storage to another's."""
    from shardplan.movement.weights.refit import refit as plan_refit
    from shardplan.report.weights import refit_object, refit_text

    check_writable(report)
    if report is not None:
        check_report()
    a = read_side("SOURCE", source, config, None)
    b = read_side("TARGET", target, config, dtype)
    if "devices=" not in target and not colocated and not Path(target).is_file():
        first = max(a.devices) + 1
        b = read_side("TARGET", target, config, dtype, range(first, first + len(b.devices)))
    limit = None if memory_limit is None else int(read_bytes("--memory-limit", memory_limit))
    where = read_topology(topology, nodes)
    plan = plan_refit(a, b, where, limit, only or None, drop=drop or (), differ=differ or ())
    if report is not None:
        from shardplan.plans.plan_file import write_atomic
        from shardplan.report.page.other_pages import refit_page

        write_atomic(report, refit_page(plan, f"refit of {source} to {target}").encode())
    print_answer(as_json, lambda: refit_object(plan), lambda: refit_text(plan))


def reshard(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkpoint: a file, or a folder.")],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="A folder, new or of a killed run.")],
    to: Annotated[str, typer.Option("--to", metavar="TABLE", help=f"{SIDE_HELP}, or a file of layouts.")],
    from_: Annotated[
        str | None, typer.Option("--from", metavar="TABLE", help="Likewise; left out, what the source says or shows.")
    ] = None,
    memory_limit: Limit = "1 GB",
    dtype: Annotated[str | None, typer.Option("--dtype", help="The destination's dtype, if it is another.")] = None,
    from_dtype: Annotated[
        str | None, typer.Option("--from-dtype", help="The source's, if its files do not say.")
    ] = None,
    form: Annotated[
        str, typer.Option("--form", help="auto, plain, devices, ranks, parts, distributed or megatron.")
    ] = "auto",
    largest_file: Annotated[
        str, typer.Option("--largest-file", metavar="BYTES", help="Of the forms plain, parts and distributed.")
    ] = "5 GB",
    config: Config = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FOLDER", help="A tokenizer's files, if not the source's.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A field of the config, in place of its own; repeatable."),
    ] = None,
    ignore: Ignore = None,
    drop: Drop = None,
    differ: Differ = None,
    changed_since: Annotated[
        Path | None,
        typer.Option(
            "--changed-since", metavar="FOLDER", help="Write a delta: what differs from FOLDER, stored alike."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Trust the source's recorded checksums.")] = False,
    no_replicas: NoReplicas = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that another process may be silent.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as another framework, or another layout, stores it.

    Under torchrun or mpiexec each process writes its part of the files.
    """
    from shardplan.cli.bar import progress_bar
    from shardplan.interop.checkpoint import reshard as run
    from shardplan.interop.checkpoint.conversion_sides import AskedConfig, source_weights, target_weights
    from shardplan.interop.checkpoint.sharing import launched_share
    from shardplan.report.weights import reshard_object, reshard_text

    limit = int(read_bytes("--memory-limit", memory_limit))
    largest = int(read_bytes("--largest-file", largest_file))
    layouts, source_layouts = _layouts(to), _layouts(from_)
    asked = AskedConfig.find(source, config, _set_fields(set_))
    a = b = None
    if layouts is None and source_layouts is not None:
        raise LayoutError("--from with a file of layouts, and --to with a table; legal is a table at both ends")
    if source_layouts is None and (layouts is None or from_ is not None):
        a = source_weights(source, from_, asked, from_dtype, ignore or (), any_model=True)
    if a is not None and layouts is None:
        b, own = target_weights(to, a, asked, dtype)
        form = own if form == "auto" else form
    elif dtype is not None:
        raise LayoutError("--dtype with a file of layouts, which keeps every dtype; legal is a table")
    share = launched_share(os.environ)
    with nullcontext() if share.number else progress_bar() as tell:
        done = run(
            source, destination, layouts, limit, source_layouts, from_=a, to=b, form=form, largest_file=largest,
            config=config, tokenizer=tokenizer, overrides=asked.overrides, ignore=ignore or (), dry_run=dry_run,
            verify=not no_verify, progress=tell, timeout=timeout,
            process=(share.number, share.count), drop=drop or (), differ=differ or (),
            compare_replicas=not no_replicas, changed_since=changed_since,
        )  # fmt: skip
    if not share.number:  # one of them says it
        print_answer(as_json, lambda: reshard_object(done), lambda: reshard_text(done, dry_run))


def apply(
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="What convert wrote with --changed-since.")],
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The checkpoint that it is for, which stays as it is.")],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="A new folder, for the new version.")],
    as_json: Json = False,
) -> None:
    """Make the version of a delta out of its base: every byte of both is read, and another base is refused."""
    from shardplan.hardware.units import format_bytes
    from shardplan.interop.checkpoint import apply_delta

    done = apply_delta(delta, base, destination)
    said = {"version": done.version, "changed": done.changed, "tensors": done.tensors, "bytes": done.nbytes}
    text = f"version {done.version[:16]}: {done.changed} of {done.tensors} tensors changed, {format_bytes(done.nbytes)}"
    print_answer(as_json, lambda: said, lambda: text)


def _has_config(place: Path) -> bool:
    return ((place if place.is_dir() else place.parent) / "config.json").is_file()


def _read_compared(
    option: str, text: str | None, place: Path, config: AskedConfig, ignore: list[str] | None
) -> Weights | None:
    """Return how a checkpoint that is compared is stored, None where it says so itself."""
    from shardplan.interop.checkpoint.conversion_sides import source_weights

    if text is None:
        return None
    return source_weights(place, text, config, ignored=ignore or (), option=option)


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint: a file, or a folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    table: Annotated[
        str | None, typer.Option("--table", metavar="TABLE", help=f"A's: {SIDE_HELP}; else what it says itself.")
    ] = None,
    other: Annotated[str | None, typer.Option("--other", metavar="TABLE", help="B's, likewise.")] = None,
    config: Config = None,
    memory_limit: Limit = "1 GB",
    ignore: Ignore = None,
    drop: Drop = None,
    differ: Differ = None,
    no_replicas: NoReplicas = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints, whatever their storage: status 1 where they differ, with the first element that does."""
    from shardplan.cli.bar import progress_bar
    from shardplan.interop.checkpoint import diff as compare
    from shardplan.interop.checkpoint.conversion_sides import AskedConfig
    from shardplan.report.weights import diff_object, diff_text

    limit = int(read_bytes("--memory-limit", memory_limit))
    first, second = (
        _read_compared(
            o, t, p, AskedConfig.find(p, config or next((f for f in (p, q) if _has_config(f)), None)), ignore
        )
        for o, t, p, q in (("--table", table, a, b), ("--other", other, b, a))
    )
    with progress_bar() as tell:
        found = compare(
            a, b, weights=first, other=second, memory_limit=limit, ignore=ignore or (), drop=drop or (),
            differ=differ or (), compare_replicas=not no_replicas, progress=tell,
        )  # fmt: skip
    print_answer(as_json, lambda: diff_object(found), lambda: diff_text(found))
    if not found.equal:
        raise typer.Exit(1)


def derive(
    model_class: Annotated[
        str,
        typer.Argument(metavar="MODEL_CLASS", help="package.module:Name, or a name of transformers; a function, too."),
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Fields of its config; of transformers' sizes are made small."),
    ] = None,
    reads: Annotated[
        str | None, typer.Option("--reads", metavar="CLASS", help="Whose checkpoints it loads, if not its own.")
    ] = None,
    tensor: Annotated[
        list[int] | None, typer.Option("--tensor", metavar="N", help="Also on N ranks of a group; repeatable.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the table goes; that of its checkpoint is beside it.")
    ] = Path("derived.toml"),
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A field of the config; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Derive how a model class stores its weights, from runs of its own loader on small models."""
    from shardplan.interop.checkpoint.conversion_sides import AskedConfig
    from shardplan.interop.derivation import derive_class_table
    from shardplan.plans.plan_file import write_atomic
    from shardplan.report.text import json_text
    from shardplan.report.weights import derived_object, derived_text

    check_writable(out)
    asked = AskedConfig.find(Path(), config, _set_fields(set_)) if config else AskedConfig(None, _set_fields(set_))
    found = derive_class_table(model_class, asked.data(), reads=reads, tensor=tensor or (), table=out.stem)
    files = {out: found.memory}
    if found.disk.name == f"{out.stem}-disk":
        files[out.with_name(f"{out.stem}-disk.toml")] = found.disk
    for path, table in files.items():
        write_atomic(path, table.toml().encode())
    print(json_text(derived_object(found, files)) if as_json else derived_text(found, files))
