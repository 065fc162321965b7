"""What a built model holds, against closed forms: parameters, moments and caches are there once."""

import pytest

from shardplan.core.accounting import account
from shardplan.strategy import Model

DIMS = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 50, "ffn": 48}


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 3), ("sgd", 1)])
@pytest.mark.parametrize(("family", "tied"), [("gpt", True), ("llama", False)])
def test_a_step_of_training_holds_its_inputs_and_every_gradient(
    family: str, tied: bool, optimizer: str, copies: int
) -> None:
    """Each update is in place, and its gradient is dropped with it; before that, a tied one is there in two parts."""
    program = Model.load(family, **DIMS, batch=1, seq=2, optimizer=optimizer).program
    books, sizes = account(program), {name: t.local_bytes() for name, t in program.types.items()}
    updates = [(n, step) for n, step in enumerate(program.steps) if step.op.name == optimizer]
    gradients = [sizes[step.operands[1]] for _, step in updates]
    few = sizes["loss"] + (sizes["step"] if copies == 3 else 0)
    for k, (number, _) in enumerate(updates):
        assert books.step_workspaces[number] == copies * sum(gradients) + few + sum(gradients[k:])
    inputs = books.input_bytes - sizes["tokens"] - sizes["targets"]
    assert books.peak_bytes == inputs + sizes["loss"] + sum(gradients) + tied * sizes["embed"]


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_decoding_holds_its_caches_once(family: str) -> None:
    """Beside them, during a step, what one layer writes of them until it lies in its row; and activations."""

    def held(longest: int) -> tuple[int, int]:
        program = Model.load(family, **DIMS, batch=2, seq=1, training=False, cache=longest).program
        caches = [t.local_bytes() for name, t in program.inputs if name.endswith("cache")]
        books = account(program)
        assert books.peak_bytes <= books.input_bytes + 2 * 32 * 4  # a token's activations
        return sum(caches), books.workspace_bytes

    (few, most), (many, much) = held(128), held(256)
    assert many == 2 * few == 2 * 2 * 4 * 2 * 128 * 32 * 4
    assert much - most == few + few // DIMS["layers"]
