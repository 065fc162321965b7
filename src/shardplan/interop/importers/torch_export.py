"""An `ExportedProgram` of torch as a flat program: one table of its operations, and its parameters.

Nothing hangs on the names of parameters, modules or models. Weights are not read: an export under `FakeTensorMode` has
none. What depends on no input is evaluated (`torch_constants`), also buffers that no checkpoint has, and whole numbers;
what the table lacks is written as torch decomposes it (`decompose_unknown`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from shardplan.core.dtypes import short_name
from shardplan.errors import ShardplanError, TypingError, excerpt, line, optional
from shardplan.interop.importers.call import Operation, Unknown, handle_operation
from shardplan.interop.importers.constant_value import write_constant
from shardplan.interop.importers.flat import Flattened
from shardplan.interop.importers.scan import ScanForm, write_scan
from shardplan.interop.importers.torch_complex import has_pairs
from shardplan.interop.importers.torch_constants import array_of, fold, folds, is_tensor
from shardplan.interop.importers.torch_indexing import INDEXING, RAW
from shardplan.interop.importers.torch_table import COMPLEX, TABLE
from shardplan.interop.importers.views import AtomView, ComplexPair
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


def is_module(source: object) -> bool:
    """Whether it is a module of torch, without importing torch."""
    return any(k.__module__ == "torch.nn.modules.module" and k.__name__ == "Module" for k in type(source).__mro__)


def export_module(module: Any, example: Any) -> Any:
    """Export a module that is called with an example: a tensor, a tuple of arguments, or a dict by their names.

    Raises `ShardplanError` with what torch says where it does not export the module.
    """
    torch: Any = optional("torch", "torch")
    if example is None:
        raise ShardplanError(f"load: {type(module).__name__} without an example; legal is one call's arguments")
    args, named = ((), dict(example)) if isinstance(example, Mapping) else (example, {})
    args = args if isinstance(args, tuple) else (args,)
    try:
        return torch.export.export(module, args, named)
    except Exception as error:
        said = f"load: torch does not export {type(module).__name__}: {type(error).__name__}: {line(error)[:400]}"
        raise ShardplanError(said) from error


def decompose_unknown(source: Any) -> Any:
    """Return an export in which what the table lacks is decomposed as torch does it, and nothing is done in place.

    What ends in operations that the table lacks, too, stays whole.
    """
    if any(_is_mutable(node) for module in source.graph_module.modules() for node in _nodes(module)):
        with contextlib.suppress(Exception):  # torch does not always; what stays is refused by name
            source = source.run_decompositions({})
    whole = set[str]()
    while True:
        found, left = _decompose(source, whole)
        if left <= whole:
            return found
        whole |= left


def _decompose(source: Any, whole: set[str]) -> tuple[Any, set[str]]:
    """An export in which all that can be is decomposed, but for some names; and what of it ends in unknown ones."""
    parents: dict[str, set[str]] = {}
    known: dict[Any, Any] | None = None
    while True:
        unknown = Unknown("the export")
        _write(source, FlatWriter({}), unknown)
        names = unknown.names - whole
        known = (known or _decompositions()) if names else {}
        targets = {node.target for module in source.graph_module.modules() for node in _nodes(module)}
        wanted = {t: known[t] for t in targets if str(t) in names and t in known}
        roots = {name: _roots(name, parents) for name in names}
        if not wanted or any(name not in map(str, wanted) for name in names):
            return source, {root for name in names for root in roots[name]}
        places = {(_place(n), str(n.target)) for n in _nodes(source.graph_module) if n.target in wanted}
        before = {*map(str, targets)}
        try:
            source = source.run_decompositions(wanted)
        except Exception:  # torch's own decomposition fails
            return source, {root for t in wanted for root in roots[str(t)]}
        for node in _nodes(source.graph_module):
            if str(node.target) not in before:
                found = {name for place, name in places if place == _place(node)}
                parents.setdefault(str(node.target), set()).update(found)


def _roots(name: str, parents: Mapping[str, set[str]], seen: frozenset[str] = frozenset()) -> set[str]:
    """The operations of the export that a name was made of."""
    above = parents.get(name, set[str]()) - seen
    return {root for p in above for root in _roots(p, parents, seen | {name})} if above else {name}


def _decompositions() -> dict[Any, Any]:
    """What torch makes of its operations: of core ATen first, then all that it has."""
    torch: Any = optional("torch", "torch")
    first = torch.export.default_decompositions()
    return {**torch._decomp.decomposition_table, **{op: first[op] for op in first.keys()}}  # noqa: SIM118


def _nodes(module: Any) -> list[Any]:
    return list(module.graph.nodes) if hasattr(module, "graph") else []


def _is_mutable(node: Any) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def flatten_source(source: Any, named: Collection[str], w: FlatWriter) -> Flattened:
    """Write the steps of an export."""
    unknown = Unknown("the export", w.opaque)
    outputs, constants = _write(source, w, unknown)
    unknown.check()
    specs = source.graph_signature.output_specs
    for spec in specs:
        if spec.kind.name.endswith("MUTATION"):
            raise TypingError(f"load: the export changes {spec.target} in place; {_LEGAL}")
    results = [v for v, spec in zip(outputs, specs, strict=True) if spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT")]
    for number, v in enumerate(results):
        if v is not None and not isinstance(v, AtomView):
            raise TypingError(f"load: result {number} is {excerpt(v)}; legal are tensors, and None, which is left out")
    chosen = [v for v in results if v is not None]
    users = [s.arg.name for s in source.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    held = {**constants, **w.constants}
    targets = {s.target for s in source.graph_signature.input_specs if s.target}
    spare = frozenset({*targets, *source.state_dict} - {p.file for p in w.parameters.values()} - held.keys())
    return Flattened(w, [n for n in users if n in w.inputs], chosen, held, spare)


def _write(source: Any, w: FlatWriter, unknown: Unknown) -> tuple[list[Any], dict[str, Any]]:
    """The values of outputs, and of inputs that are buffers."""
    values, constants = _bind_placeholders(source, w)
    return _graph(w, source.graph_module, values, unknown), constants


def _type(fake: Any) -> tuple[str, tuple[int, ...]]:
    return short_name(str(fake.dtype).removeprefix("torch.")), tuple(int(n) for n in fake.shape)


def _bind_placeholders(source: Any, w: FlatWriter) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Inputs by their nodes, and the values of those that are constants."""
    values: dict[Any, Any] = {}
    constants: dict[str, Any] = {}
    seen: dict[Any, AtomView] = {}
    nodes = {n.name: n for n in source.graph.nodes if n.op == "placeholder"}
    for spec in source.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        fake, kind = node.meta.get("val"), spec.kind.name
        if kind == "USER_INPUT":
            values[node] = w.input(node.name, *_type(fake)) if hasattr(fake, "shape") else spec.arg.value
            continue
        held = {**source.constants, **source.state_dict}.get(spec.target) if kind != "PARAMETER" else None
        tensor = source.state_dict.get(spec.target, held)
        if kind != "PARAMETER" and tensor is not None and is_tensor(tensor) and not _is_trained(spec, tensor):
            values[node] = tensor
            continue
        storage = node if tensor is None else _storage(tensor)
        if storage not in seen:
            name = spec.target
            if kind == "PARAMETER":
                seen[storage] = w.parameter(name, name, *_type(fake))
            else:
                seen[storage] = w.input(name, *_type(fake))
                if tensor is not None and is_tensor(tensor):
                    constants[name] = array_of(tensor)
        values[node] = seen[storage]
    return values, constants


def _storage(tensor: Any) -> tuple[Any, ...]:
    """What two names of one tensor have in common."""
    return tensor.untyped_storage()._cdata, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _is_trained(spec: Any, tensor: Any) -> bool:
    """Whether a checkpoint may have another value of a buffer: running means, say, not positions or masks."""
    return bool(spec.kind.name == "BUFFER" and spec.persistent and tensor.is_floating_point())


class _Graph:
    """A graph while it is written: values of its nodes by the node, and views of those that are constants."""

    def __init__(self, w: FlatWriter, module: Any, values: dict[Any, Any], unknown: Unknown) -> None:
        self.w, self.module, self.values, self.unknown = w, module, values, unknown
        self.views: dict[int, tuple[Any, AtomView | ComplexPair]] = {}  # by id a constant, and its view

    def write(self) -> list[Any]:
        """Write all nodes; the values of the outputs."""
        outputs = list[Any]()
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = _attribute(self.module, node.target)
            elif node.op == "output":
                outputs += self._value(list(node.args[0]))
            elif node.op == "call_function":
                self.values[node] = self._value_of_node(node)
        return [self.view(v) if is_tensor(v) else v for v in outputs]

    def _value(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            items: Any = x
            return [self._value(item) for item in items]
        return self.values[x] if hasattr(x, "graph") and x in self.values else x

    def _value_of_node(self, node: Any) -> Any:
        name, unknown = _name(node), self.unknown
        args, kwargs = self._value(list(node.args)), {k: self._value(v) for k, v in node.kwargs.items()}
        if any(name.endswith(region) for region in _INLINED):
            return _inline_region(self.w, self.view(args), unknown)
        if name == "cond" and (isinstance(args[0], bool) or is_tensor(args[0])):
            return _inline(self.w, args[1] if bool(args[0]) else args[2], args[3], unknown)
        if name == "scan":
            return _write_scan(self.w, *self.view(args), unknown=unknown)
        if name == "getitem" and not isinstance(args[0], AtomView | ComplexPair):
            return args[0][args[1]]
        if folds(node, name, args, kwargs):
            made = fold(node, name, args, kwargs)
            if is_tensor(made):
                self._write_plain(node, name, args, kwargs, made)
            return made
        try:
            if name not in RAW:
                args, kwargs = self.view(args), {k: self.view(v) for k, v in kwargs.items()}
        except ShardplanError as error:
            return _write_node(self.w, node, name, [], {}, unknown, line(error))
        return _write_node(self.w, node, name, args, kwargs, unknown)

    def view(self, x: Any) -> Any:
        """A constant as a view: by the steps that make it where these are plain, else by its value."""
        if isinstance(x, list):
            items: Any = x
            return [self.view(item) for item in items]
        if not is_tensor(x):
            return x
        if id(x) not in self.views:
            first = len(self.w.builder.steps)
            self.views[id(x)] = x, _constant(self.w, x)
            self.w.hoisted.update(range(first, len(self.w.builder.steps)))
        return self.views[id(x)][1]

    def _write_plain(self, node: Any, name: str, args: Any, kwargs: Any, made: Any) -> None:
        """Write a constant by steps where they say each element by a formula of its place: it has other sizes, too."""
        given = [x for x in _leaves([args, list(kwargs.values())]) if is_tensor(x)]
        if name not in TABLE or name in INDEXING or any(x.numel() > 1 and id(x) not in self.views for x in given):
            return
        lacking = Unknown("a constant")
        args, kwargs = self.view(args), {k: self.view(v) for k, v in kwargs.items()}
        view = _write_node(self.w, node, name, args, kwargs, lacking)
        if not lacking.names and isinstance(view, AtomView):
            self.views[id(made)] = made, view


def _leaves(values: Any) -> list[Any]:
    return [x for v in values for x in _leaves(v)] if isinstance(values, list) else [values]


def _graph(w: FlatWriter, module: Any, values: dict[Any, Any], unknown: Unknown) -> list[Any]:
    """Write a graph whose placeholders have values; those of its outputs."""
    return _Graph(w, module, values, unknown).write()


def _name(node: Any) -> str:
    """What an operation is called in the table."""
    said = str(node.target)
    return said if "." in said and "built-in" not in said else node.target.__name__


def _constant(w: FlatWriter, tensor: Any) -> AtomView | ComplexPair:
    if tensor.is_complex():
        return ComplexPair(*(write_constant(w, array_of(part)) for part in (tensor.real, tensor.imag)))
    return write_constant(w, array_of(tensor))


def _write_node(
    w: FlatWriter, node: Any, name: str, args: Any, kwargs: Any, unknown: Unknown, refused: str = ""
) -> Any:
    fakes = node.meta.get("val")
    found = [f for f in (fakes if isinstance(fakes, (list, tuple)) else [fakes]) if hasattr(f, "shape")]
    _refuse_dynamic_sizes(node, found)
    kinds, shapes = zip(*(_type(f) for f in found), strict=True) if found else ((), ())
    call = Operation(w, name, tuple(kinds), tuple(shapes))
    table = COMPLEX if has_pairs([args, list(kwargs.values())]) else TABLE
    made = handle_operation(call, table, unknown, _place(node), args, kwargs, refused)
    return [made] if isinstance(fakes, (list, tuple)) and isinstance(made, AtomView) else made


def _refuse_dynamic_sizes(node: Any, found: list[Any]) -> None:
    """Refuse a result whose sizes hang on values."""
    for n in (n for fake in found for n in fake.shape):
        if not isinstance(n, int) and not n.node.has_hint():
            raise TypingError(f"load: {node.target} has a result of {n} elements along a dim, as its values are "
                              f"({_place(node)}); legal are sizes that shapes say")  # fmt: skip


def _attribute(module: Any, target: str) -> Any:
    for part in target.split("."):
        module = getattr(module, part)
    return module


def _inline_region(w: FlatWriter, args: list[Any], unknown: Unknown) -> list[Any]:
    """The region of an op that runs a graph."""
    at = next(k for k, a in enumerate(args) if hasattr(a, "graph") and hasattr(a.graph, "nodes"))
    outputs = _inline(w, args[at], args[at + 1 :], unknown)
    # Without gradients: what is made there is a constant to those outside.
    return [w.stop_gradient(v) if args[0] is False and isinstance(v, AtomView) else v for v in outputs]


def _inline(w: FlatWriter, module: Any, args: list[Any], unknown: Unknown) -> list[Any]:
    """A graph that is called, in the place of the call."""
    given = [n for n in module.graph.nodes if n.op == "placeholder"]
    return _graph(w, module, dict(zip(given, args, strict=True)), unknown)


def _write_scan(
    w: FlatWriter, module: Any, first: list[Any], rows: list[Any], same: Any, unknown: Unknown
) -> list[Any]:
    """Write torch's scan, along the first dim of what it goes through."""
    nodes = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
    carried, every = len(first), len(first) + len(rows)
    results = next(n for n in module.graph.nodes if n.op == "output").args[0]
    kinds = [_type(fake) for fake in (*nodes[every:], *nodes[:every])]
    form = ScanForm(len(same), carried, kinds, [_type(n.meta["val"]) for n in results], next(v.shape[0] for v in rows))

    def write(inner: FlatWriter, args: list[Any]) -> list[Any]:
        return _inline(inner, module, [*args[len(same) :], *args[: len(same)]], unknown)

    return list(write_scan(w, form, [*same, *first, *rows], write))


def _place(node: Any) -> str:
    """Where an operation stands in the model: its module, and the line that calls it."""
    modules: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    inside = list(modules.values())[-1][0] if modules else ""
    trace = [part.strip() for part in (node.stack_trace or "").splitlines() if part.strip()]
    return f"{inside or 'the model'}: {trace[-1] if trace else node.name}"
