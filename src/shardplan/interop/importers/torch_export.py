"""An `ExportedProgram` of torch as a flat program: one table of its operations, and its parameters.

Nothing hangs on the names of parameters, modules or models. Weights are not read: an export under `FakeTensorMode` has
none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shardplan.core.dtypes import short_name
from shardplan.errors import optional
from shardplan.interop.importers.call import Operation, Unknown, handled
from shardplan.interop.importers.flat import Flattened
from shardplan.interop.importers.torch_table import TABLE
from shardplan.interop.importers.views import Seen
from shardplan.interop.importers.writer import FlatWriter

_INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")  # regions that only say how gradients are kept


def read_export(path: str) -> Any:
    """Load a `.pt2` file."""
    torch: Any = optional("torch", "torch")
    return torch.export.load(path)


def is_export(source: object) -> bool:
    """Whether it is an `ExportedProgram`, without importing torch."""
    kind = type(source)
    return kind.__module__.startswith("torch.export") and kind.__name__ == "ExportedProgram"


def flattened(source: Any, named: Collection[str], w: FlatWriter) -> Flattened:
    """Write the steps of an export."""
    unknown = Unknown("the export")
    values, constants = _given(source, w)
    outputs: list[Seen] = []
    _graph(w, source.graph_module, source.graph, values, unknown, outputs)
    unknown.check()
    specs = source.graph_signature.output_specs
    chosen = [v for v, spec in zip(outputs, specs, strict=True) if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")]
    users = [s.arg.name for s in source.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    return Flattened(w, [n for n in users if n in w.inputs], chosen, constants)


def _type(fake: Any) -> tuple[str, tuple[int, ...]]:
    return short_name(str(fake.dtype).removeprefix("torch.")), tuple(int(n) for n in fake.shape)


def _given(source: Any, w: FlatWriter) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Inputs by their nodes, and the values of those that are constants."""
    values: dict[Any, Any] = {}
    constants: dict[str, Any] = {}
    seen: dict[Any, Seen] = {}
    nodes = {n.name: n for n in source.graph.nodes if n.op == "placeholder"}
    for spec in source.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        fake, kind = node.meta.get("val"), spec.kind.name
        if kind == "USER_INPUT":
            values[node] = w.input(node.name, *_type(fake)) if hasattr(fake, "shape") else spec.arg.value
            continue
        held = {**source.constants, **source.state_dict}.get(spec.target) if kind != "PARAMETER" else None
        tensor = source.state_dict.get(spec.target, held)
        if kind != "PARAMETER" and not fake.shape and tensor is not None and not _is_fake(tensor):
            values[node] = tensor.item()
            continue
        storage = node if tensor is None else _storage(tensor)
        if storage not in seen:
            name = spec.target
            if kind == "PARAMETER":
                seen[storage] = w.parameter(name, name, *_type(fake))
            else:
                seen[storage] = w.input(name, *_type(fake))
                if tensor is not None and not _is_fake(tensor):
                    constants[name] = tensor.detach().cpu().numpy()
        values[node] = seen[storage]
    return values, constants


def _storage(tensor: Any) -> tuple[Any, ...]:
    """What two names of one tensor have in common."""
    return tensor.untyped_storage()._cdata, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _is_fake(tensor: Any) -> bool:
    return type(tensor).__name__ == "FakeTensor" or tensor.device.type == "meta"


def _graph(
    w: FlatWriter, module: Any, graph: Any, values: dict[Any, Any], unknown: Unknown, outputs: list[Any]
) -> None:
    """Write the nodes of a graph whose placeholders have values."""

    def value(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            items: Any = x
            return [value(item) for item in items]
        return values[x] if hasattr(x, "graph") and x in values else x

    for node in graph.nodes:
        if node.op == "get_attr":
            values[node] = _attribute(module, node.target)
        elif node.op == "output":
            outputs += value(list(node.args[0]))
        elif node.op == "call_function":
            name = (
                str(node.target)
                if "." in str(node.target) and "built-in" not in str(node.target)
                else node.target.__name__
            )
            args, kwargs = value(list(node.args)), {k: value(v) for k, v in node.kwargs.items()}
            if any(name.endswith(region) for region in _INLINED):
                values[node] = _inlined(w, args, unknown)
                continue
            fakes = node.meta.get("val")
            found = [f for f in (fakes if isinstance(fakes, (list, tuple)) else [fakes]) if hasattr(f, "shape")]
            kinds, shapes = zip(*(_type(f) for f in found), strict=True) if found else ((), ())
            call = Operation(w, name, tuple(kinds), tuple(shapes))
            values[node] = handled(call, TABLE, unknown, _place(node), args, kwargs)


def _attribute(module: Any, target: str) -> Any:
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _inlined(w: FlatWriter, args: list[Any], unknown: Unknown) -> list[Any]:
    """The region of an op that runs a graph."""
    at = next(k for k, a in enumerate(args) if hasattr(a, "graph") and hasattr(a.graph, "nodes"))
    inner, outputs = args[at], list[Any]()
    given = [n for n in inner.graph.nodes if n.op == "placeholder"]
    _graph(w, inner, inner.graph, dict(zip(given, args[at + 1 :], strict=True)), unknown, outputs)
    # Without gradients: what is made there is a constant to those outside.
    return [w.stopped(v) if args[0] is False and isinstance(v, Seen) else v for v in outputs]


def _place(node: Any) -> str:
    """Where an operation stands in the model: its module, and the line that calls it."""
    modules: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    inside = list(modules.values())[-1][0] if modules else ""
    trace = [part.strip() for part in (node.stack_trace or "").splitlines() if part.strip()]
    line = trace[-1] if trace else node.name
    return f"{inside or 'the model'}: {line}"
