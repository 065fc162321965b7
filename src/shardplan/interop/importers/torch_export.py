"""An `ExportedProgram` of torch as a flat program: one table of its operations, and its parameters.

Nothing hangs on the names of parameters, modules or models. Weights are not read: an export under `FakeTensorMode` has
none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import getitem
from typing import Any

from shardplan.core.dtypes import short_name
from shardplan.errors import TypingError, excerpt, optional
from shardplan.interop.importers.call import Operation, Unknown, handle_operation
from shardplan.interop.importers.flat import Flattened
from shardplan.interop.importers.torch_table import TABLE
from shardplan.interop.importers.views import Seen
from shardplan.interop.importers.writer import FlatWriter

_LEGAL = "legal is a module that changes no input, buffer or parameter: model.eval()"
_INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")  # regions that only say how gradients are kept


def read_export(path: str) -> Any:
    """Load a `.pt2` file."""
    torch: Any = optional("torch", "torch")
    return torch.export.load(path)


def is_export(source: object) -> bool:
    """Whether it is an `ExportedProgram`, without importing torch."""
    kind = type(source)
    return kind.__module__.startswith("torch.export") and kind.__name__ == "ExportedProgram"


def flatten_source(source: Any, named: Collection[str], w: FlatWriter) -> Flattened:
    """Write the steps of an export."""
    unknown = Unknown("the export", w.opaque)
    values, constants = _bind_placeholders(source, w)
    outputs = list[Any]()
    _graph(w, source.graph_module, source.graph, values, unknown, outputs)
    unknown.check()
    for module in source.graph_module.modules():
        if hasattr(module, "graph"):
            _refuse_in_place(module.graph)
    specs = source.graph_signature.output_specs
    for spec in specs:
        if spec.kind.name.endswith("MUTATION"):
            raise TypingError(f"load: the export changes {spec.target} in place; {_LEGAL}")
    results = [v for v, spec in zip(outputs, specs, strict=True) if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")]
    for number, v in enumerate(results):
        if v is not None and not isinstance(v, Seen):
            raise TypingError(f"load: result {number} is {excerpt(v)}; legal are tensors, and None, which is left out")
    chosen = [v for v in results if v is not None]
    users = [s.arg.name for s in source.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    return Flattened(w, [n for n in users if n in w.inputs], chosen, constants)


def _type(fake: Any) -> tuple[str, tuple[int, ...]]:
    return short_name(str(fake.dtype).removeprefix("torch.")), tuple(int(n) for n in fake.shape)


def _bind_placeholders(source: Any, w: FlatWriter) -> tuple[dict[Any, Any], dict[str, Any]]:
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
            values[node] = w.constant(tensor.item(), _type(fake)[0])
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
                values[node] = _inline_region(w, args, unknown)
                continue
            fakes = node.meta.get("val")
            found = [f for f in (fakes if isinstance(fakes, (list, tuple)) else [fakes]) if hasattr(f, "shape")]
            _refuse_dynamic_sizes(node, found)
            kinds, shapes = zip(*(_type(f) for f in found), strict=True) if found else ((), ())
            call = Operation(w, name, tuple(kinds), tuple(shapes))
            made = handle_operation(call, TABLE, unknown, _place(node), args, kwargs)
            values[node] = [made] if isinstance(fakes, (list, tuple)) and isinstance(made, Seen) else made


def _refuse_in_place(graph: Any) -> None:
    """Refuse an operation in place that changes what is given, or what another name has that is read later."""
    places = {node: k for k, node in enumerate(graph.nodes)}
    roots: dict[Any, Any] = {}  # of each value the first one whose elements it shares
    for number, node in enumerate(graph.nodes):
        roots[node] = node
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None:  # a part of a list shares what the list does
            roots[node] = roots.get(node.args[0], node) if node.args and node.target is getitem else node
            continue
        shares = any(r.alias_info is not None for r in schema.returns)
        for argument, given in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not hasattr(given, "users"):
                continue
            root = roots[given]
            if shares and _kind_of(node) in (None, _kind_of(given)):
                roots[node] = root
            if not argument.alias_info.is_write:
                continue
            later = [n for n, r in roots.items() if r is root and n is not node
                     and any(places[u] > number for u in n.users)]  # fmt: skip
            if root.op == "placeholder":
                raise TypingError(f"load: {node.target} changes {root.name} in place ({_place(node)}); {_LEGAL}")
            if later:
                raise TypingError(f"load: {node.target} changes in place what {later[0].name} reads, too "
                                  f"({_place(node)}); legal is a new value")  # fmt: skip


def _refuse_dynamic_sizes(node: Any, found: list[Any]) -> None:
    """Refuse a result whose sizes hang on values."""
    for n in (n for fake in found for n in fake.shape):
        if not isinstance(n, int) and not n.node.has_hint():
            raise TypingError(f"load: {node.target} has a result of {n} elements along a dim, as its values are "
                              f"({_place(node)}); legal are sizes that shapes say")  # fmt: skip


def _kind_of(node: Any) -> Any:
    """The dtype of a tensor; None of a list."""
    return getattr(node.meta.get("val"), "dtype", None)


def _attribute(module: Any, target: str) -> Any:
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _inline_region(w: FlatWriter, args: list[Any], unknown: Unknown) -> list[Any]:
    """The region of an op that runs a graph."""
    at = next(k for k, a in enumerate(args) if hasattr(a, "graph") and hasattr(a.graph, "nodes"))
    inner, outputs = args[at], list[Any]()
    given = [n for n in inner.graph.nodes if n.op == "placeholder"]
    _graph(w, inner, inner.graph, dict(zip(given, args[at + 1 :], strict=True)), unknown, outputs)
    # Without gradients: what is made there is a constant to those outside.
    return [w.stop_gradient(v) if args[0] is False and isinstance(v, Seen) else v for v in outputs]


def _place(node: Any) -> str:
    """Where an operation stands in the model: its module, and the line that calls it."""
    modules: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    inside = list(modules.values())[-1][0] if modules else ""
    trace = [part.strip() for part in (node.stack_trace or "").splitlines() if part.strip()]
    line = trace[-1] if trace else node.name
    return f"{inside or 'the model'}: {line}"
