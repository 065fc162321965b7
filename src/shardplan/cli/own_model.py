"""A program of one's own, where a command takes a model: a file, or `module:function`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardplan.errors import ShardplanError

if TYPE_CHECKING:
    from shardplan.strategy.asked_model import AskedModel
    from shardplan.strategy.model import Model


def is_own_model(text: str) -> bool:
    """Say whether a text is of a program of one's own, and no preset or config."""
    from shardplan.interop.importers.source_text import is_source

    return is_source(text.partition(",")[0])


def read_own_model(text: str, seq: int | None, without: Mapping[str, object]) -> tuple[AskedModel, Model]:
    """Return a training step of a program with one scalar result, its loss, and how it is called.

    `seq` is the size of its dim `sequence`; of `without`, options by name, none may be given: they make a model anew,
    by its name.

    Raises `ShardplanError` for such an option, a change that is no `seq=N`, and as `load_source` does.
    """
    from shardplan.interop.importers.source_text import load_source
    from shardplan.strategy.asked_model import AskedModel, parse_model
    from shardplan.strategy.model import Model

    for name in (name for name, given in without.items() if given):
        raise ShardplanError(f"plan: {name} with {text}, a program of its own; legal is a preset, or a config, with it")
    source, comma, rest = text.partition(",")
    changes = dict(parse_model(f"gpt{comma}{rest}", seq).fields)
    size = changes.pop("seq", None)
    if changes:
        raise ShardplanError(f"plan: {next(iter(changes))} of {source}, a program of its own; legal is seq")
    model = load_source(source, training=True)
    if not isinstance(model, Model):
        raise ShardplanError(f"plan: {source} is a trace, no model")
    model = model if size is None else model.resize(seq=size)
    named = [name for name, dims in model.dims.items() if "batch" in dims and name not in model.parameters]
    batch = f"the batch is a dim of {', '.join(named)}" if named else "no dim is called batch"
    note = f"{source} is a program of its own: in {model.fields['dtype']}, as it is, with AdamW; {batch}"
    return AskedModel(source, model.name, {}, (note,)), model
