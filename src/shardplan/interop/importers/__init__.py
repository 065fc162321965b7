"""Models of other systems, as a `Model` of ours: one entry, `load`.

Reading order:

- `views`        a value as a source sees it: transposed, split, joined or repeated without a step
- `writer`       the steps on such values, laid out where an op needs it
- `composites`   what frameworks name as one operation, with our ops
- `call`         one operation of a source; the error that lists all that are not known
- `formulas`     functions that every framework has, as expressions
- `constant_value` a constant by what its value says; `indexing` rows, windows, orders and sums so far
- `flat`         from what was written to a `Model`: `repeat` recovered, names of dims and parameters; `columns` what
                 a tensor axis may cut
- `torch_export` an `ExportedProgram`, or a module that is exported; `torch_constants` what torch evaluates of it;
                 `torch_table` what its operations are, with `torch_pointwise`, `torch_indexing` and `torch_complex`
- `jaxpr`        a closed jaxpr; `jax_table` what its primitives are
- `scan`         a scan of either as `repeat`
- `source_text`  a source by a text, as commands take it: a file, or `module:function`
- `onnx`         an ONNX model; `onnx_table` what its operations are

Text of a module that XLA compiled is no model, but a trace: `interop.hlo_trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, overload

from shardplan.core import validation
from shardplan.errors import ShardplanError, excerpt
from shardplan.interop.hlo_trace import HloTrace
from shardplan.interop.importers import jaxpr, onnx, torch_export
from shardplan.interop.importers.flat import Flattened, Names, model_of, write_until_stable
from shardplan.interop.importers.writer import FlatWriter
from shardplan.strategy.model import Model
from shardplan.strategy.training import OPTIMIZERS

_READERS: dict[str, Callable[[str], Any]] = {".onnx": onnx.read_onnx, ".pt2": torch_export.read_export}


class _Kind(NamedTuple):
    """A kind of source: what it is called, whether a value is one, and how it is written."""

    called: str
    fits: Callable[[object], bool]
    write: Callable[[Any, Collection[str], FlatWriter], Flattened]
    prepare: Callable[[Any], Any] = lambda source: source  # once, however often it is written


_KINDS = (
    _Kind("an ExportedProgram", torch_export.is_export, torch_export.flatten_source, torch_export.decompose_unknown),
    _Kind("a closed jaxpr", jaxpr.is_jaxpr, jaxpr.flatten_source),
    _Kind("an ONNX model", onnx.is_onnx, onnx.flatten_source),
)
_TRACE = ".hlo"
_ENDINGS = f"paths that end in {', '.join((*_READERS, _TRACE))}"


@overload
def load(
    source: str | Path,
    example: Any = None,
    names: Names | None = None,
    opaque: bool = False,
    *,
    training: bool = False,
    optimizer: str | None = None,
    **settings: float,
) -> Any: ...
@overload
def load(
    source: object,
    example: Any = None,
    names: Names | None = None,
    opaque: bool = False,
    *,
    training: bool = False,
    optimizer: str | None = None,
    **settings: float,
) -> Model: ...
def load(
    source: Any,
    example: Any = None,
    names: Names | None = None,
    opaque: bool = False,
    *,
    training: bool = False,
    optimizer: str | None = None,
    **settings: float,
) -> Model | HloTrace:
    """Import a model; its layers become one `repeat`. Of the text of a module that XLA compiled, return the trace.

    Args:
        source: A torch module, a path that ends in `.onnx`, `.pt2` or `.hlo`, an `ExportedProgram`, a closed jaxpr, or
            an ONNX model.
        example: Of a module what it is called with, as `torch.export` takes it: a tensor, a tuple of arguments, or a
            dict by their names. Of another source `names` may stand here.
        names: Names of the dims of inputs, as `{"input_ids": ("batch", "sequence")}`; None for a dim without one.
        opaque: Whether operations that are not known are kept as `opaque`; else they are one error that lists them.
        training: Whether the one scalar result is a loss, of which a training step is made with our gradients.
        optimizer: `sgd`, `adamw` or `adafactor`, or None for gradients as outputs.
        settings: Those of the optimizer.

    Raises `ShardplanError` for another kind of source, a module that torch does not export, and what has no meaning
    here: operations by name, each with where the model calls it.
    """
    validation.flag("load: opaque", opaque, ShardplanError)
    validation.flag("load: training", training, ShardplanError)
    if optimizer is not None:
        validation.choice("load: optimizer", optimizer, tuple(OPTIMIZERS), ShardplanError)
        if not training:
            raise ShardplanError(f"load: optimizer={optimizer!r} without training; legal is None")
    name = "import"
    if torch_export.is_module(source):
        name, source = type(source).__name__, torch_export.export_module(source, example)
    elif example is not None:
        if names is not None or not isinstance(example, Mapping):
            raise ShardplanError(f"load: {excerpt(example)} beside {excerpt(source)}; legal is an example of a module")
        names = example
    if isinstance(source, str | Path):
        path = Path(source)
        if path.suffix == _TRACE:
            if names or opaque or training or settings:
                raise ShardplanError(f"load: {path.name} is a trace, no model; legal is the path alone")
            return HloTrace.read(path)
        read = _READERS.get(path.suffix)
        if read is None:
            raise ShardplanError(f"load: {excerpt(str(source))}; legal are {_ENDINGS}")
        name, source = path.stem, read(str(path))
    for kind in _KINDS:
        if kind.fits(source):
            write = partial(kind.write, kind.prepare(source), tuple(names or ()))
            return model_of(name, write_until_stable(write, opaque, training), names, training, optimizer, settings)
    legal = ", ".join(kind.called for kind in _KINDS)
    raise ShardplanError(f"load: {excerpt(source)}; legal are {legal}, a module with an example, and {_ENDINGS}")
