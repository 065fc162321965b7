"""Optimizer state: it has the shape of its parameter and is stored alike, under another name and dtype.

Moments under DTensor (FSDP2, torchtitan, `fsdp_dtensor` of Megatron) and whole tensors in a `fully_reshardable` folder
of Megatron-LM d98e8a6 are stored by the same expressions as the weights. A `dp_reshardable` folder holds flat buckets
whose borders depend on the degrees of the run that wrote it, and is refused by name.

A state of a logical tensor is one of its own, `exp_avg__q` of `q`. The count of steps is a scalar a parameter, which
all that are named alike share: `step__l`, of one dim, for those whose names hold a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardplan.errors import LayoutError
from shardplan.movement.weights.form import StoredForm, walk_factors
from shardplan.movement.weights.logical import logical_dims
from shardplan.movement.weights.table import TableParameter, WeightTable
from shardplan.movement.weights.weights import Weights

STEP, MASTER, ROUNDED = "step", "param", "rounded"
STEPS = "optimizer_step"  # the field of a config that says the count of steps, where no tensor does
_OF = "__"


@dataclass(frozen=True, slots=True)
class ParameterState:
    """One state of one parameter of a table: how its name is made, and its dtype, `""` for that which files have.

    `under` is what the parameter's name begins with, and that in the state's does not; `when` the condition of a count
    of steps that all parameters share.
    """

    parameter: str
    state: str
    form: str
    dtype: str = ""
    under: str = ""
    when: str = ""

    @property
    def name(self) -> str:
        """The pattern of its names."""
        return self.form.replace("{name}", self.parameter.removeprefix(self.under)).replace("{state}", self.state)


def buckets_error() -> LayoutError:
    """Return the error of a folder of flat buckets."""
    return LayoutError(
        "optimizer state as dp_reshardable is flat buckets cut by the data parallelism of the run that wrote it; "
        "legal is to save it with --dist-ckpt-optim-fully-reshardable, and fully_reshardable here"
    )


def add_states(table: WeightTable, states: Iterable[ParameterState]) -> WeightTable:
    """Return a table with states of its parameters beside them, in the order that is given.

    The state `param` is the parameter itself, in the optimizer's dtype: a target stores both, and of a source
    `part_masters` says which one counts.

    >>> llama = WeightTable.read("hf-llama")
    >>> found = add_states(llama, [ParameterState("lm_head.weight", "exp_avg", "optim.state.{name}.{state}", "f32")])
    >>> found.parameters[-1].name, str(found.parameters[-1].form)
    ('optim.state.lm_head.weight.exp_avg', 'exp_avg__head = v, e')
    """
    dims_of, terms = dict(table.tensors), StateTensors(table)
    entries: list[TableParameter] = []
    every = [(each, k) for each in states for k, p in enumerate(table.parameters) if p.name == each.parameter]
    for each, k in every:  # several parameters of a table have one name, each under conditions of its own
        p = table.parameters[k]
        if each.state == STEP:
            dims = _named_dims(p, dims_of[p.form.tensors[0]], table)
            name = step_tensor(dims)
            terms.logical[name] = dims or "1"
            form = StoredForm(name, () if "{name}" in each.form else StoredForm.parse(dims or "1").dims)
        elif each.state == MASTER:
            form = p.form
        else:
            form = terms.rename(p.form, each.state)
        entry = replace(p, name=each.name, form=form, dtype=each.dtype, plus=0)
        if each.state == STEP and "{name}" not in each.form:  # one for all parameters
            on = replace(entry, name=f"{each.form}{form.tensor}", when=each.when, unless="")
            entry = next((e for e in entries if e.name == on.name), on)
        entries.append(entry)
    return terms.apply((*table.parameters, *dict.fromkeys(entries)))


def part_masters(table: WeightTable) -> WeightTable:
    """Return a source's table in which the optimizer's own parameters are the model's tensors.

    The model's parameters then hold what they were rounded to, `rounded__q`, which nobody needs to take.
    """
    doubled = rounded_names(table)
    if not doubled:
        return table
    terms = StateTensors(table)
    held = [replace(p, form=terms.rename(p.form, ROUNDED)) if p.name in doubled else p for p in table.parameters]
    return replace(terms.apply(held), recomputed=(*table.recomputed, f"{ROUNDED}{_OF}*"))


def rounded_names(table: WeightTable) -> set[str]:
    """Return the parameters of a table that are there once more, as an optimizer's own."""
    masters = [(p.name, p.form) for p in table.parameters if f".{MASTER}." in p.name or f".fp32_{MASTER}." in p.name]
    return {
        p.name for p in table.parameters for name, form in masters if form == p.form and name.endswith(f".{p.name}")
    }


class StateTensors:
    """The logical tensors of a table while states are added."""

    def __init__(self, table: WeightTable) -> None:
        """Begin with the table's own."""
        self.table, self.logical, self.same = table, dict(table.tensors), list(table.same)

    def rename(self, form: StoredForm, state: str) -> StoredForm:
        """Return the form of a state of what a form holds."""
        dims, names = dict(self.table.tensors), {t: f"{state}{_OF}{t}" for t in form.tensors}
        self.logical |= {name: dims[t] for t, name in names.items()}
        for a, b, when in self.table.same:
            if a in names:
                self.logical[f"{state}{_OF}{b}"] = dims[b]
                self.same.append((names[a], f"{state}{_OF}{b}", when))
        return form.rename(names)

    def apply(self, parameters: Iterable[TableParameter]) -> WeightTable:
        """Return the table with these parameters, and the tensors that there are by now."""
        same = tuple(dict.fromkeys(self.same))
        return replace(self.table, tensors=tuple(self.logical.items()), same=same, parameters=tuple(parameters))


def _named_dims(p: TableParameter, tensor: str, table: WeightTable) -> str:
    """The dims of a parameter's tensor that stand in its name, as text."""
    stored = {f.item for dim in p.form.dims for f in walk_factors(dim) if isinstance(f.item, str)}
    holes = dict(table.holes)
    dims = logical_dims(p.form.tensors[0], tensor)
    return ", ".join(str(d) for d in dims if any(a in holes for a in d.atoms) and not set(d.atoms) & stored)


def step_tensor(dims: str) -> str:
    """Return the logical tensor of the count of steps, of parameters whose names hold some dims.

    >>> step_tensor("l[3:61], x"), step_tensor("")
    ('step__l_3_61_x', 'step__')
    """
    return STEP + _OF + re.sub(r"\W+", "_", dims).strip("_")


def is_state(tensor: str) -> bool:
    """Whether a logical tensor is a state of another one."""
    return _OF in tensor


def states_of(weights: Weights) -> dict[str, dict[str, str]]:
    """Return the states that a side stores, by logical tensor of the model: each with its dtype."""
    out: dict[str, dict[str, str]] = {}
    for family in weights.families:
        for tensor in family.tensors:
            if is_state(tensor):
                state, _, of = tensor.partition(_OF)
                out.setdefault(of, {})[state] = family.dtype
    return out
