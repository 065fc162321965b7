"""`OperatorSpec`: what is said once of an operator, and its registration as PyTorch's, forward and backward.

Its schema, what runs it, the shapes of its results, and its gradient; from these `register_operator` makes
`torch.ops.shardplan.NAME`, `NAME_backward` and, where there is something to run, `NAME_out`. Operands that are tensors
come first. Those that need all ranks in their backward have an `anchor`, see `library`.
"""

from __future__ import annotations

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
ORDER = "remote_first"


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """What is to be known of an operator.

    Args:
        name: Of the operator.
        tensors: Names of the operands that are tensors, in order; one that ends with `?` may be None.
        settings: The schema of the others, one of which is `group`.
        forward: Of the call's context, tensors and settings: the result, or several, of which the first is
            differentiated.
        fake: Of the group's heap, tensors and settings: the shapes of results.
        backward: Of the context, the gradient, what was saved, and settings: the gradients of tensors, None of one
            that has none. Without it the gradient is of `local_gradient`.
        local_gradient: The same of the gradient and the tensors, where nothing is sent.
        saved: Of inputs and results, what is kept for the backward in place of the tensors.
        fake_gradients: Of the heap, what was saved and settings: the shapes of gradients; without it those of tensors.
        write: Of the context, `out`, tensors and settings: what `NAME_out` does.
        results: Of the schema.
        constants: How many of the last tensors have no gradient.
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
    constants: int = 0

    @property
    def arguments(self) -> str:
        """The schema of tensors and settings."""
        kinds = (f"Tensor{'?' * name.endswith('?')} {name.removesuffix('?')}" for name in self.tensors)
        return ", ".join((*kinds, self.settings))


def call_context(group: str, tiles: int = 0, order: str = ORDER) -> CallContext:
    """Return what an operator is asked beside its tensors, by the name of a group."""
    heap = bound(group)
    # In a forward that autograd differentiates it is off; where it is on here, no operand needs a gradient.
    return CallContext(heap, tiles, order, heap.seconds, backward=not torch.is_grad_enabled(), even=True)


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
    group, tiles, order = (names.index(name) if name in names else -1 for name in ("group", "tiles", "order"))

    def context(settings: Sequence[Any]) -> CallContext:
        asks = (settings[tiles] if tiles >= 0 else 0, settings[order] if order >= 0 else ORDER)
        return call_context(settings[group], *asks)

    def settings_of(given: Sequence[Any]) -> Sequence[Any]:
        return given[count : count + len(names)]

    def forward(*given: Any) -> Any:
        settings = settings_of(given)
        return spec.forward(context(settings), *given[:count], *settings)

    def fake(*given: Any) -> Any:
        settings = settings_of(given)
        return spec.fake(bound(settings[group]), *given[:count], *settings)

    anchored = spec.backward is not None
    anchor = ", Tensor? anchor=None" if anchored else ""
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
        ctx.save_for_backward(*(inputs[:count] if spec.saved is None else spec.saved(inputs, output)))

    def gradient(ctx: Any, g: Any, *rest: Any) -> Any:
        saved, none = ctx.saved_tensors, [None] * (len(names) + spec.constants)
        if op_back is None:
            assert spec.local_gradient is not None
            return (*spec.local_gradient(g, *saved), *none)
        *found, end = op_back(g, *saved, *ctx.rest)
        found = [None if x is None else each for x, each in zip(saved, found, strict=False)]
        return (*found, *none, end if ctx.anchor else None)

    op.register_autograd(gradient, setup_context=setup)


def _register_backward(spec: OperatorSpec, context: Callable[[Sequence[Any]], CallContext]) -> Any:
    """Register the gradient as an operator: of what was saved, of which each has one of its shape, or no elements."""
    count = len(spec.tensors)
    differentiated = count - spec.constants
    backward = spec.backward
    assert backward is not None

    def run(g: Any, *given: Any) -> Any:
        found = backward(context(given[count:]), g, *given)
        return *(g.new_empty(0) if x is None else x for x in found), torch.zeros((), device="cpu")

    def fake(g: Any, *given: Any) -> Any:
        if spec.fake_gradients is not None:
            found = spec.fake_gradients(context(given[count:]).heap, *given)
        else:
            found = [g.new_empty(0) if x is None else torch.empty_like(x) for x in given[:differentiated]]
        return *found, torch.empty((), device="cpu")

    results = ", ".join(["Tensor"] * (differentiated + 1))
    plain = ", ".join(part.split("=")[0] for part in spec.arguments.split(", "))
    return register_custom(f"{spec.name}_backward", f"(Tensor g, {plain}) -> ({results})", run, fake)
