"""`OperatorSpec`: what is said once of an operator, and its registration as PyTorch's, forward and backward.

Its schema, what runs it, the shapes of its results, and its gradient; from these `register_operator` makes
`torch.ops.shardplan.NAME`, `NAME_backward` and, where there is something to run, `NAME_out`. Operands that are tensors
come first. Those that need all ranks in their backward have an `anchor`, see `library`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardplan.errors import optional
from shardplan.fused.calls.groups import bound
from shardplan.fused.operators.call_context import CallContext

if TYPE_CHECKING:
    import torch
else:
    torch = optional("torch", "torch")

Run = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """What is to be known of an operator.

    Args:
        name: Of the operator.
        tensors: Names of the operands that are tensors, in order; one that ends with `?` may be None, `[]` is a list.
        settings: The schema of the others, one of which is `group`. With a list of tensors nothing has a default: torch
            2.13 compares their structure with what was passed.
        forward: Of the call's context, tensors and settings: the result, or several, of which the first is
            differentiated.
        fake: Of the group's heap, tensors and settings: the shapes of results.
        backward: Of the context, the gradient, what was saved, and settings: the gradients of tensors that have one,
            None of one that is None. Without it the gradient is of `local_gradient`.
        local_gradient: The same of the gradient and the tensors, where nothing is sent.
        saved: Of inputs and results, what is kept for the backward in place of the tensors.
        fake_gradients: Of the heap, what was saved and settings: the shapes of gradients; without it those of tensors.
        write: Of the context, `out`, tensors and settings: what `NAME_out` does.
        results: Of the schema.
        constants: Names of tensors that have no gradient.
    """

    name: str
    tensors: tuple[str, ...]
    settings: str
    forward: Run
    fake: Run
    backward: Run | None = None
    local_gradient: Run | None = None
    saved: Run | None = None
    fake_gradients: Run | None = None
    write: Run | None = None
    results: str = "Tensor"
    constants: tuple[str, ...] = ()

    @property
    def arguments(self) -> str:
        """The schema of tensors and settings."""
        names = [re.fullmatch(r"(\w+)(.*)", name) for name in self.tensors]
        return ", ".join((*(f"Tensor{name[2]} {name[1]}" for name in names if name), self.settings))

    @property
    def has_list(self) -> bool:
        """Whether an operand is a list of tensors."""
        return any(name.endswith("[]") for name in self.tensors)

    @property
    def differentiated(self) -> list[int]:
        """Which tensors have a gradient."""
        return [k for k, name in enumerate(self.tensors) if name not in self.constants]


def call_context(group: str, tiles: int = 0) -> CallContext:
    """Return what an operator is asked beside its tensors, by the name of a group."""
    heap = bound(group)
    # In a forward that autograd differentiates it is off; where it is on here, no operand needs a gradient.
    return CallContext(heap, tiles, heap.seconds, backward=not torch.is_grad_enabled(), even=True)


def register_custom(name: str, schema: str, run: Run, fake: Run) -> Any:
    """Register an operator of a schema; `run` and `fake` are given all arguments, also those left out."""
    arguments = getattr(torch, "_C").parse_schema(f"shardplan::{name}{schema}").arguments  # noqa: B009, no public one
    defaults = [argument.default_value for argument in arguments]

    def whole(call: Run) -> Run:
        return lambda *given: call(*given, *defaults[len(given) :])

    written = ("out",) if name.endswith("_out") else ()
    made = torch.library.custom_op(f"shardplan::{name}", whole(run), mutates_args=written, schema=schema)
    made.register_fake(whole(fake))
    return made


def register_operator(spec: OperatorSpec) -> None:
    """Register an operator, its gradient, and its form that writes a result into a tensor of the heap."""
    count = len(spec.tensors)
    names = [part.split()[-1].split("=")[0] for part in spec.settings.split(", ")]
    group, tiles = (names.index(name) if name in names else -1 for name in ("group", "tiles"))

    def context(settings: Sequence[Any]) -> CallContext:
        return call_context(settings[group], settings[tiles] if tiles >= 0 else 0)

    def settings_of(given: Sequence[Any]) -> Sequence[Any]:
        return given[count : count + len(names)]

    def forward(*given: Any) -> Any:
        settings = settings_of(given)
        return spec.forward(context(settings), *given[:count], *settings)

    def fake(*given: Any) -> Any:
        settings = settings_of(given)
        return spec.fake(bound(settings[group]), *given[:count], *settings)

    anchored = spec.backward is not None
    anchor = f", Tensor? anchor{'' if spec.has_list else '=None'}" if anchored else ""
    op = register_custom(spec.name, f"({spec.arguments}{anchor}) -> {spec.results}", forward, fake)
    if spec.write is not None:
        write = spec.write

        def into(out: Any, *given: Any) -> None:
            write(context(settings_of(given)), out, *given)

        register_custom(f"{spec.name}_out", f"(Tensor(a!) out, {spec.arguments}) -> ()", into, lambda *_: None)
    op_back = _register_backward(spec, context) if anchored else None

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rest, ctx.anchor = settings_of(inputs), inputs[-1] is not None
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])
        kept = inputs[:count] if spec.saved is None else spec.saved(inputs, output)
        ctx.sizes = [len(x) if isinstance(x, list | tuple) else -1 for x in kept]
        ctx.save_for_backward(*_flatten_lists(kept))

    def gradient(ctx: Any, g: Any, *rest: Any) -> Any:
        saved, given = _regroup_lists(ctx.saved_tensors, ctx.sizes), [None] * len(names)
        if op_back is None:
            assert spec.local_gradient is not None
            return (*spec.local_gradient(g, *saved), *given)
        *found, end = op_back(g, *saved, *ctx.rest)
        own = spec.differentiated
        of = dict(zip(own, _regroup_lists(found, [ctx.sizes[k] for k in own]), strict=True))
        return (*(None if saved[k] is None else of.get(k) for k in range(count)), *given, end if ctx.anchor else None)

    op.register_autograd(gradient, setup_context=setup)


def _flatten_lists(given: Sequence[Any]) -> list[Any]:
    """What is in lists, and what is none, in order."""
    return [y for x in given for y in (x if isinstance(x, list | tuple) else (x,))]


def _regroup_lists(given: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """The same again as lists, of these sizes, or -1 of what is none."""
    left = iter(given)
    return [next(left) if n < 0 else [next(left) for _ in range(n)] for n in sizes]


def _register_backward(spec: OperatorSpec, context: Callable[[Sequence[Any]], CallContext]) -> Any:
    """Register the gradient as an operator: of what was saved, of which each has one of its shape, or no elements."""
    count = len(spec.tensors)
    backward = spec.backward
    assert backward is not None

    def results(found: Sequence[Any]) -> Any:
        return [*found] if spec.has_list else tuple(found)

    def run(g: Any, *given: Any) -> Any:
        found = backward(context(given[count:]), g, *given)
        return results(
            [*(g.new_empty(0) if x is None else x for x in _flatten_lists(found)), torch.zeros((), device="cpu")]
        )

    def fake(g: Any, *given: Any) -> Any:
        if spec.fake_gradients is not None:
            found = spec.fake_gradients(context(given[count:]).heap, *given)
        else:
            operands = _flatten_lists([given[k] for k in spec.differentiated])
            found = [g.new_empty(0) if x is None else torch.empty_like(x) for x in operands]
        return results([*found, torch.empty((), device="cpu")])

    kinds = "Tensor[]" if spec.has_list else f"({', '.join(['Tensor'] * (len(spec.differentiated) + 1))})"
    plain = ", ".join(part.split("=")[0] for part in spec.arguments.split(", "))
    return register_custom(f"{spec.name}_backward", f"(Tensor g, {plain}) -> {kinds}", run, fake)
